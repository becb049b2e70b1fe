"""stages/rl/kl.py: worked numbers, slow oracle, laws (unbiasedness by exact enumeration), gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from stages.rl.kl import KlLimits, adaptive_kl_coefficient, kl_estimate, kl_k1, kl_k2, kl_k3
from tests.unit import rl_oracles

ESTIMATORS = ["k1", "k2", "k3"]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_estimators_by_hand() -> None:
    lp, ref = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -1.0]).double()
    # d = 0.5 and -1
    assert kl_k1(lp, ref_logprobs=ref).tolist() == [0.5, -1.0]
    # d^2/2 = 0.125 and 0.5
    assert kl_k2(lp, ref_logprobs=ref).tolist() == [0.125, 0.5]
    # exp(-0.5) - 1 + 0.5 = 0.6065307 - 0.5;  exp(1) - 1 - 1 = 0.7182818
    assert kl_k3(lp, ref_logprobs=ref).tolist() == pytest.approx([0.1065307, 0.7182818], abs=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_agree_with_the_oracle(estimator: str) -> None:
    lp, ref = randn(4, 9, seed=1) * 3, randn(4, 9, seed=2) * 3
    found = kl_estimate(lp, ref_logprobs=ref, estimator=estimator)
    for place in [(b, t) for b in range(4) for t in range(9)]:
        expected = rl_oracles.kl(lp[place].item(), ref[place].item(), estimator=estimator)
        assert found[place].item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_k1_and_k3_are_unbiased_and_k2_is_close() -> None:
    """The expectation over all of a small vocabulary, exactly, against the KL itself."""
    policy, reference = randn(6, 11, seed=3).log_softmax(-1), randn(6, 11, seed=4).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum(-1)
    mean = {}
    for name in ESTIMATORS:
        mean[name] = (policy.exp() * kl_estimate(policy, ref_logprobs=reference, estimator=name)).sum(-1)
    torch.testing.assert_close(mean["k1"], exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(mean["k3"], exact, rtol=0, atol=1e-12)
    near = (policy + 0.01 * randn(6, 11, seed=5)).log_softmax(-1)
    exact = (policy.exp() * (policy - near)).sum(-1)
    k2 = (policy.exp() * kl_k2(policy, ref_logprobs=near)).sum(-1)
    torch.testing.assert_close(k2, exact, rtol=0.05, atol=0)


def test_gradient_of_k2_is_that_of_the_kl_and_of_k1_is_zero() -> None:
    """E[grad k2] = grad KL, E[grad k1] = 0, over a whole vocabulary with fixed sampling weights."""
    logits, reference = randn(7, seed=6).requires_grad_(), randn(7, seed=7).log_softmax(-1)
    policy = logits.log_softmax(-1)
    weights = policy.exp().detach()
    (kl,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    gradients = {}
    for name in ("k1", "k2"):
        loss = (weights * kl_estimate(policy, ref_logprobs=reference, estimator=name)).sum()
        (gradients[name],) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(gradients["k2"], kl, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients["k1"], torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)


def test_laws() -> None:
    lp, ref = randn(50, seed=1), randn(50, seed=2)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    for name in ESTIMATORS:
        found = kl_estimate(lp, ref_logprobs=ref, estimator=name)
        assert not kl_estimate(lp, ref_logprobs=lp, estimator=name).any()
        shifted = kl_estimate(lp - 3, ref_logprobs=ref - 3, estimator=name)
        torch.testing.assert_close(shifted, found, rtol=0, atol=1e-12)
        assert torch.equal(kl_estimate(lp[order], ref_logprobs=ref[order], estimator=name), found[order])
    assert (kl_k2(lp, ref_logprobs=ref) >= 0).all() and (kl_k3(lp, ref_logprobs=ref) >= 0).all()
    assert torch.equal(kl_k1(lp, ref_logprobs=ref), -kl_k1(ref, ref_logprobs=lp))


def test_k3_neither_overflows_nor_loses_small_differences() -> None:
    far = kl_k3(torch.tensor([-500.0, 0.0]), ref_logprobs=torch.tensor([0.0, -500.0]))
    assert far.isfinite().all()
    assert far.tolist() == pytest.approx([math.exp(20) - 21, math.exp(-20) + 19], rel=1e-6)
    near = kl_k3(torch.tensor([-1.0], dtype=torch.float64), ref_logprobs=torch.tensor([-1.0 - 1e-5]).double())
    assert near.item() == pytest.approx(5e-11, rel=1e-4)  # d^2/2; exp(-d) - 1 + d as written loses six digits more


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_reach_the_policy_alone(estimator: str) -> None:
    lp, ref = randn(12, seed=1).requires_grad_(), randn(12, seed=2).requires_grad_()
    fixed = ref.detach()
    assert gradcheck(lambda x: kl_estimate(x, ref_logprobs=fixed, estimator=estimator), (lp,))
    kl_estimate(lp, ref_logprobs=ref, estimator=estimator).sum().backward()
    assert ref.grad is None and lp.grad is not None and lp.grad.any()


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="expected k1, k2 or k3, found 'k4'"):
        kl_estimate(torch.zeros(1), ref_logprobs=torch.zeros(1), estimator="k4")  # type: ignore[arg-type]


def test_limits_by_hand() -> None:
    lp, ref = torch.tensor([0.0, -14.0, -0.5]).double(), torch.tensor([-14.0, 0.0, 0.0]).double()
    cut = KlLimits(k1=10.0, k2=10.0, k3=10.0)
    # d = 14, -14, -0.5
    assert kl_estimate(lp, ref_logprobs=ref, estimator="k1", limits=cut).tolist() == [10.0, -10.0, -0.5]
    assert kl_estimate(lp, ref_logprobs=ref, estimator="k2", limits=cut).tolist() == [10.0, 10.0, 0.125]
    k3 = kl_estimate(lp, ref_logprobs=ref, estimator="k3", limits=cut)
    assert k3.tolist() == pytest.approx([10.0, 10.0, math.exp(0.5) - 1.5])
    free = kl_estimate(lp * 2, ref_logprobs=ref * 2, estimator="k3", limits=KlLimits(log_ratio=None))
    assert free.tolist() == pytest.approx([math.exp(-28) + 27, math.exp(28) - 29, math.e - 2])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_limits_agree_with_the_oracle_and_stop_gradients_where_they_act(estimator: str) -> None:
    lp, ref = (randn(80, seed=1) * 3).requires_grad_(), randn(80, seed=2) * 3
    cut = KlLimits(k1=2.0, k2=2.0, k3=2.0)
    found = kl_estimate(lp, ref_logprobs=ref, estimator=estimator, limits=cut)
    expected = [
        rl_oracles.kl(x, y, estimator=estimator, limit=2.0) for x, y in zip(lp.tolist(), ref.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert gradcheck(lambda x: kl_estimate(x, ref_logprobs=ref, estimator=estimator, limits=cut), (lp,))
    found.sum().backward()
    acts = found.detach().abs() == 2.0
    assert acts.any() and not lp.grad[acts].any() and lp.grad[~acts].any()


def step(kl_coef: float, kl: float, n: int = 64) -> float:
    return adaptive_kl_coefficient(kl_coef, kl=kl, kl_target=0.1, kl_horizon=640.0, num_rollouts=n)


def test_adaptive_coefficient_by_hand() -> None:
    # 0.11 / 0.1 - 1 = 0.1 -> 1 + 0.1 * 64/640 = 1.01
    assert step(0.05, 0.11) == pytest.approx(0.0505)
    # 0.5 / 0.1 - 1 = 4 -> cut to 0.2 -> 1.02;  0 / 0.1 - 1 = -1 -> cut to -0.2 -> 0.98
    assert step(0.05, 0.5) == pytest.approx(0.051)
    assert step(0.05, 0.0) == pytest.approx(0.049)
    assert step(0.05, -3.0) == pytest.approx(0.049)


def test_adaptive_coefficient_laws() -> None:
    assert step(0.05, 0.1) == 0.05
    assert step(0.0, 0.5) == 0.0
    found = [step(0.05, kl / 100) for kl in range(40)]
    assert found == sorted(found) and found[0] < 0.05 < found[-1]
    assert step(0.10, 0.3) == pytest.approx(2 * step(0.05, 0.3))
    assert step(0.05, 0.3, n=0) == 0.05
