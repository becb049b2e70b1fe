"""stages/rl/losses.py: dual clip, GSPO, CISPO and REINFORCE by worked numbers, oracles, laws and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from stages.rl.aggregation import token_weights
from stages.rl.losses import (
    completion_mean,
    completion_sum,
    policy_loss,
    policy_loss_cispo,
    policy_loss_clip,
    policy_loss_gspo,
    policy_loss_reinforce,
    value_loss_clip,
)
from tests.unit import rl_oracles

LENGTHS = torch.tensor([4, 1, 7, 3])
N = 15
NAMES = ["clip", "gspo", "cispo", "reinforce"]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(x_N: Tensor) -> list[list[float]]:
    return [part.tolist() for part in x_N.split(LENGTHS.tolist())]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, old_logprobs and one advantage per completion, on its tokens."""
    return randn(N, seed=1), randn(N, seed=2), randn(4, seed=3).repeat_interleave(LENGTHS)


def gspo(lp: Tensor, old: Tensor, a: Tensor) -> Tensor:
    return policy_loss_gspo(lp, old_logprobs_N=old, advantages_N=a, lengths_B=LENGTHS, **CLIP).loss


def by_name(name: str, lp: Tensor, old: Tensor, a: Tensor, lengths: Tensor = LENGTHS) -> Tensor:
    return policy_loss(name, lp, old_logprobs_N=old, advantages_N=a, lengths_B=lengths, **CLIP).loss  # type: ignore[arg-type]


# dual clip


def test_dual_clip_by_hand() -> None:
    ratio = torch.tensor([1.0, 2.0, 5.0, 5.0, 0.5], dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    zero = torch.zeros(5).double()
    found = policy_loss_clip(ratio.log(), old_logprobs=zero, advantages=advantages, **CLIP, dual_clip=3.0)
    # 1; 2; min(5, 3) = 3; -1.3, untouched because A > 0; the clip at 0.8
    assert found.loss.tolist() == pytest.approx([1.0, 2.0, 3.0, -1.3, 0.8])
    assert found.clipped.tolist() == [False, False, True, True, True]


def test_dual_clip_agrees_with_the_oracle_and_bounds_the_loss() -> None:
    lp, old, a = 2 * randn(60, seed=1), randn(60, seed=2), randn(60, seed=3)
    found = policy_loss_clip(lp, old_logprobs=old, advantages=a, **CLIP, dual_clip=3.0)
    expected = [
        rl_oracles.policy_loss(x, y, z, **CLIP, dual_clip=3.0)
        for x, y, z in zip(lp.tolist(), old.tolist(), a.tolist(), strict=True)
    ]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-12)
    free = policy_loss_clip(lp, old_logprobs=old, advantages=a, **CLIP)
    assert (found.loss <= free.loss).all() and (found.loss <= 3 * a.abs()).all()
    assert torch.equal(found.loss[a > 0], free.loss[a > 0]) and (found.loss < free.loss).any()
    far = policy_loss_clip(lp, old_logprobs=old, advantages=a, **CLIP, dual_clip=1e9)
    assert torch.equal(far.loss, free.loss)


def test_dual_clip_stops_the_gradient_where_it_acts() -> None:
    lp, old = (2 * randn(60, seed=1)).requires_grad_(), randn(60, seed=2).requires_grad_()
    a = randn(60, seed=3).requires_grad_()
    fixed = {"old_logprobs": old.detach(), "advantages": a.detach(), **CLIP, "dual_clip": 3.0}
    assert gradcheck(lambda x: policy_loss_clip(x, **fixed).loss, (lp,))
    found = policy_loss_clip(lp, old_logprobs=old, advantages=a, **CLIP, dual_clip=3.0)
    found.loss.sum().backward()
    assert old.grad is None and a.grad is None
    torch.testing.assert_close(lp.grad, torch.where(found.clipped, 0.0, -found.ratio * a.detach()))


def test_without_a_limit_the_ratio_is_free() -> None:
    lp, old, a = torch.tensor([25.0]).double(), torch.zeros(1).double(), torch.tensor([-1.0]).double()
    found = policy_loss_clip(lp, old_logprobs=old, advantages=a, **CLIP, log_ratio_limit=None)
    assert found.loss.item() == pytest.approx(math.exp(25))
    assert policy_loss_clip(lp, old_logprobs=old, advantages=a, **CLIP).loss.item() == pytest.approx(math.exp(20))


# GSPO


def test_gspo_by_hand() -> None:
    lp, old = torch.tensor([-1.0, -2.0, -1.0]).double(), torch.tensor([-1.2, -2.4, -1.0]).double()
    a = torch.tensor([1.0, 1.0, -2.0]).double()
    found = policy_loss_gspo(
        lp, old_logprobs_N=old, advantages_N=a, lengths_B=torch.tensor([2, 1]), clip_low=0.2, clip_high=0.2
    )
    # mean of 0.2 and 0.4: exp(0.3) = 1.349859, clipped at 1.2 for A > 0; the second: ratio 1, -1 * -2
    assert found.ratio.tolist() == pytest.approx([1.349859, 1.349859, 1.0], abs=1e-6)
    assert found.loss.tolist() == pytest.approx([-1.2, -1.2, 2.0])
    assert found.clipped.tolist() == [True, True, False]


def test_gspo_agrees_with_the_oracle() -> None:
    lp, old, a = inputs()
    found = rows(gspo(lp, old, a))
    for b, (x, y, z) in enumerate(zip(rows(lp), rows(old), rows(a), strict=True)):
        assert found[b] == pytest.approx([rl_oracles.gspo(x, y, z[0], **CLIP)] * len(x), rel=1e-10)


def test_gspo_has_the_gradient_of_the_sequence_ratio() -> None:
    """The per-token form against the form of the paper, whose gradient is checked against differences."""
    lp, old, a = inputs()
    lp.requires_grad_(), old.requires_grad_(), a.requires_grad_()
    weights = token_weights(LENGTHS, aggregation="sequence_mean", dtype=torch.float64).repeat_interleave(LENGTHS)

    def paper(x: Tensor) -> Tensor:
        ratio = completion_mean(x - old.detach(), lengths_B=LENGTHS).exp()
        surrogate = torch.minimum(ratio * a.detach(), ratio.clamp(0.8, 1.3) * a.detach())
        return -(weights * surrogate).sum()

    assert gradcheck(paper, (lp,))
    (expected,) = torch.autograd.grad(paper(lp), lp)
    loss = (weights * gspo(lp, old, a)).sum()
    assert loss.item() == pytest.approx(paper(lp).item(), rel=1e-12)
    loss.backward()
    torch.testing.assert_close(lp.grad, expected, rtol=1e-12, atol=1e-15)
    assert old.grad is None and a.grad is None and lp.grad is not None and lp.grad.any()


def test_gspo_of_one_token_is_ppo() -> None:
    lp, old, a = randn(6, seed=1), randn(6, seed=2), randn(6, seed=3)
    found = policy_loss_gspo(lp, old_logprobs_N=old, advantages_N=a, lengths_B=torch.ones(6).long(), **CLIP)
    torch.testing.assert_close(found.loss, policy_loss_clip(lp, old_logprobs=old, advantages=a, **CLIP).loss)


# CISPO and REINFORCE


def test_cispo_by_hand() -> None:
    ratio = torch.tensor([1.0, 2.0, 0.1], dtype=torch.float64)
    lp, a = torch.tensor([-1.0, -0.5, -3.0]).double(), torch.tensor([2.0, -1.0, 1.0]).double()
    found = policy_loss_cispo(lp, old_logprobs=lp - ratio.log(), advantages=a, clip_low=1.0, clip_high=0.5)
    # -1*2*-1 = 2; weight 2 -> 1.5: -1.5*-1*-0.5 = -0.75; 0.1 stays, there is no lower bound: -0.1*1*-3 = 0.3
    assert found.loss.tolist() == pytest.approx([2.0, -0.75, 0.3])
    assert found.clipped.tolist() == [False, True, False]


def test_cispo_agrees_with_the_oracle_and_keeps_every_gradient() -> None:
    lp, old, a = randn(60, seed=1).requires_grad_(), randn(60, seed=2).requires_grad_(), randn(60, seed=3)
    a.requires_grad_()
    found = policy_loss_cispo(lp, old_logprobs=old, advantages=a, **CLIP)
    expected = [
        rl_oracles.cispo(x, y, z, **CLIP) for x, y, z in zip(lp.tolist(), old.tolist(), a.tolist(), strict=True)
    ]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-12)
    found.loss.sum().backward()
    assert old.grad is None and a.grad is None
    weight = (lp - old).exp().clamp(0.8, 1.3).detach()
    torch.testing.assert_close(lp.grad, -weight * a.detach())  # also where the clip acted, unlike PPO's
    assert found.clipped.any() and lp.grad.all()
    fixed = (weight * a).detach()
    assert gradcheck(lambda x: -fixed * x, (lp,))  # the weight is a constant


def test_reinforce_by_hand_and_its_gradient() -> None:
    lp, old = torch.tensor([-1.0, -0.5]).double().requires_grad_(), torch.tensor([-2.0, -0.5]).double()
    a = torch.tensor([2.0, -3.0]).double().requires_grad_()
    found = policy_loss_reinforce(lp, old_logprobs=old, advantages=a)
    assert found.loss.tolist() == [2.0, -1.5]
    assert found.ratio.tolist() == pytest.approx([math.e, 1.0]) and not found.clipped.any()
    assert gradcheck(lambda x: policy_loss_reinforce(x, old_logprobs=old, advantages=a.detach()).loss, (lp,))
    found.loss.sum().backward()
    assert a.grad is None and lp.grad.tolist() == [-2.0, 3.0]


# all of them


@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_1_every_loss_has_the_policy_gradient(name: str) -> None:
    lp, _, a = inputs()
    lp.requires_grad_()
    by_name(name, lp, lp.detach(), a).sum().backward()
    torch.testing.assert_close(lp.grad, -a)


@pytest.mark.parametrize("name", NAMES)
def test_laws_of_every_loss(name: str) -> None:
    lp, old, a = inputs()
    found = by_name(name, lp, old, a)
    torch.testing.assert_close(by_name(name, lp, old, 7 * a), 7 * found)
    assert not by_name(name, lp, old, 0 * a).any()
    order = [2, 0, 3, 1]
    mixed = [torch.cat([x.split(LENGTHS.tolist())[b] for b in order]) for x in (lp, old, a, found)]
    torch.testing.assert_close(by_name(name, *mixed[:3], lengths=LENGTHS[order]), mixed[3])
    alone = [by_name(name, *(x.split(LENGTHS.tolist())[b] for x in (lp, old, a)), LENGTHS[b : b + 1]) for b in range(4)]
    torch.testing.assert_close(torch.cat(alone), found)  # completions do not mix
    if name in ("clip", "gspo"):
        torch.testing.assert_close(by_name(name, lp - 5, old - 5, a), found)
    far = by_name(name, lp + 900, old, a)
    assert far.isfinite().all()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_step_does_not_depend_on_its_microbatches(name: str, aggregation: str) -> None:
    """Rollouts in another order, cut into 1, 2 or 4 microbatches, as one rank or several would have them."""
    lp, old, a = inputs()
    weights = token_weights(LENGTHS, aggregation=aggregation, dtype=torch.float64, horizon_tokens=9)  # type: ignore[arg-type]
    parts = [x.split(LENGTHS.tolist()) for x in (lp, old, a)]
    gradients = []
    for size, order in ((4, [0, 1, 2, 3]), (2, [2, 0, 3, 1]), (1, [3, 2, 1, 0])):
        leaves = [row.clone().requires_grad_() for row in parts[0]]
        for start in range(0, 4, size):
            chosen = order[start : start + size]
            new, before, credit = (torch.cat([rows[b] for b in chosen]) for rows in (leaves, *parts[1:]))
            loss = by_name(name, new, before, credit, LENGTHS[chosen])
            (weights[chosen].repeat_interleave(LENGTHS[chosen]) * loss).sum().backward()
        gradients.append(torch.cat([leaf.grad for leaf in leaves]))  # type: ignore[misc]
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=0, atol=1e-15)


def test_the_clip_by_name_takes_every_bound() -> None:
    lp, old = torch.tensor([25.0, 3.0]).double(), torch.zeros(2).double()
    given = {"old_logprobs_N": old, "advantages_N": -torch.ones(2).double(), "lengths_B": torch.tensor([2]), **CLIP}
    free = policy_loss("clip", lp, **given, log_ratio_limit=None).loss
    assert free.tolist() == pytest.approx([math.exp(25), math.exp(3)])
    assert policy_loss("clip", lp, **given).loss[0].item() == pytest.approx(math.exp(20))
    assert policy_loss("clip", lp, **given, dual_clip=3.0).loss.tolist() == [3.0, 3.0]


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(ValueError, match="loss: expected clip, gspo, cispo or reinforce, found 'dpo'"):
        by_name("dpo", *inputs())


def test_completion_sums() -> None:
    x = randn(N, seed=5)
    expected = [[math.fsum(row)] * len(row) for row in rows(x)]
    assert rows(completion_sum(x, lengths_B=LENGTHS)) == [pytest.approx(row) for row in expected]
    means = [[value / len(row) for value in row] for row in expected]
    assert rows(completion_mean(x, lengths_B=LENGTHS)) == [pytest.approx(row) for row in means]


def test_a_value_loss_without_a_clip_is_half_the_square() -> None:
    new, old, returns = randn(20, seed=1), randn(20, seed=2), randn(20, seed=3)
    found = value_loss_clip(new, values=old, returns=returns, value_clip=None)
    torch.testing.assert_close(found.loss, 0.5 * (new - returns) ** 2)
    assert not found.clipped.any()
