"""stages/rl/losses.py: worked numbers, slow oracles, laws, gradients in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from stages.rl.losses import PolicyLoss, policy_loss_clip, token_weights, value_loss_clip
from tests.unit import rl_oracles


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def policy(lp: Tensor, old: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.3) -> PolicyLoss:
    return policy_loss_clip(lp, old_logprobs=old, advantages=advantages, clip_low=low, clip_high=high)


def test_policy_loss_by_hand() -> None:
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 1.1], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0, -1.0], dtype=torch.float64)
    found = policy(ratio.log(), torch.zeros(6).double(), advantages)
    # clip to [0.8, 1.3]. 1.0*2 = 2;  min(3, 2.6) = 2.6 clipped;  min(-3, -2.6) = -3;  min(1, 1.6) = 1;
    # min(-1, -1.6) = -1.6 clipped;  1.1*-1 = -1.1
    assert found.loss.tolist() == pytest.approx([-2.0, -2.6, 3.0, -1.0, 1.6, 1.1])
    assert found.clipped.tolist() == [False, True, False, False, True, False]
    assert found.ratio.tolist() == pytest.approx(ratio.tolist())


def test_policy_loss_agrees_with_the_oracle_on_any_shape() -> None:
    lp, old, advantages = randn(3, 40, seed=1), randn(3, 40, seed=2), randn(3, 40, seed=3)
    found = policy(lp, old, advantages).loss
    for place in [(b, t) for b in range(3) for t in range(40)]:
        expected = rl_oracles.policy_loss(
            lp[place].item(), old[place].item(), advantages[place].item(), clip_low=0.2, clip_high=0.3
        )
        assert found[place].item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(policy(lp.flatten(), old.flatten(), advantages.flatten()).loss, found.flatten())


def test_policy_loss_laws() -> None:
    lp, old, advantages = randn(60, seed=1), randn(60, seed=2), randn(60, seed=3)
    found = policy(lp, old, advantages)
    same = policy(lp, lp, advantages)
    assert torch.equal(same.loss, -advantages) and (same.ratio == 1).all() and not same.clipped.any()
    torch.testing.assert_close(policy(lp - 5, old - 5, advantages).loss, found.loss)
    torch.testing.assert_close(policy(lp, old, 7 * advantages).loss, 7 * found.loss)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    assert torch.equal(policy(lp[order], old[order], advantages[order]).loss, found.loss[order])
    assert (found.loss >= -found.ratio * advantages - 1e-12).all()  # a pessimistic bound
    assert not policy(lp, old, advantages, low=0.999, high=1e9).clipped[advantages > 0].any()
    assert not policy(lp, old, 0 * advantages).loss.any()


def test_policy_loss_does_not_overflow() -> None:
    lp, old = torch.tensor([0.0, -900.0]), torch.tensor([-900.0, 0.0])
    found = policy(lp, old, torch.tensor([-1.0, 1.0]))
    assert found.loss.tolist() == pytest.approx([math.exp(20), -math.exp(-20)], rel=1e-6)


def test_policy_gradient() -> None:
    lp = randn(60, seed=1).requires_grad_()
    old, advantages = randn(60, seed=2).requires_grad_(), randn(60, seed=3).requires_grad_()
    assert gradcheck(lambda x: policy(x, old.detach(), advantages.detach()).loss, (lp,))
    found = policy(lp, old, advantages)
    assert not found.ratio.requires_grad and not found.clipped.requires_grad
    found.loss.sum().backward()
    assert old.grad is None and advantages.grad is None
    # d loss / d logprob = -ratio * A where the clip is idle, and 0 where it acts
    expected = torch.where(found.clipped, 0.0, -found.ratio * advantages.detach())
    torch.testing.assert_close(lp.grad, expected)
    assert found.clipped.any() and not found.clipped.all()


def test_at_ratio_1_the_gradient_is_the_policy_gradient() -> None:
    lp, advantages = randn(20, seed=1).requires_grad_(), randn(20, seed=3)
    policy(lp, lp.detach(), advantages).loss.sum().backward()
    torch.testing.assert_close(lp.grad, -advantages)


def test_value_loss_by_hand() -> None:
    new, old = torch.tensor([0.0, 1.0, 1.0, -1.0]).double(), torch.zeros(4).double()
    returns = torch.tensor([0.5, 0.5, 2.0, -0.3]).double()
    found = value_loss_clip(new, values=old, returns=returns, value_clip=0.2)
    # 0: clip(0) = 0, 0.5*0.25 = 0.125.  1 -> 0.2: max(0.25, 0.09)/2 = 0.125.  1 -> 0.2: max(1, 3.24)/2 = 1.62 clipped.
    # -1 -> -0.2: max(0.49, 0.01)/2 = 0.245
    assert found.loss.tolist() == pytest.approx([0.125, 0.125, 1.62, 0.245])
    assert found.clipped.tolist() == [False, False, True, False]


def test_value_loss_agrees_with_the_oracle_on_any_shape() -> None:
    new, old, returns = randn(3, 30, seed=1), randn(3, 30, seed=2), randn(3, 30, seed=3)
    found = value_loss_clip(new, values=old, returns=returns, value_clip=0.5).loss
    for place in [(b, t) for b in range(3) for t in range(30)]:
        expected = rl_oracles.value_loss(new[place].item(), old[place].item(), returns[place].item(), value_clip=0.5)
        assert found[place].item() == pytest.approx(expected, rel=1e-12)


def test_value_loss_laws() -> None:
    new, old, returns = randn(60, seed=1), randn(60, seed=2), randn(60, seed=3)
    found = value_loss_clip(new, values=old, returns=returns, value_clip=0.5)
    moved = value_loss_clip(new + 4, values=old + 4, returns=returns + 4, value_clip=0.5)
    torch.testing.assert_close(moved.loss, found.loss)
    mirrored = value_loss_clip(-new, values=-old, returns=-returns, value_clip=0.5)
    torch.testing.assert_close(mirrored.loss, found.loss)
    free = value_loss_clip(new, values=old, returns=returns, value_clip=1e9)
    torch.testing.assert_close(free.loss, 0.5 * (new - returns) ** 2)
    assert not free.clipped.any() and (found.loss >= free.loss).all()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    shuffled = value_loss_clip(new[order], values=old[order], returns=returns[order], value_clip=0.5)
    assert torch.equal(shuffled.loss, found.loss[order])


def test_value_gradient() -> None:
    new = randn(60, seed=1).requires_grad_()
    old, returns = randn(60, seed=2).requires_grad_(), randn(60, seed=3).requires_grad_()
    fixed = {"values": old.detach(), "returns": returns.detach(), "value_clip": 0.5}
    assert gradcheck(lambda x: value_loss_clip(x, **fixed).loss, (new,))
    found = value_loss_clip(new, values=old, returns=returns, value_clip=0.5)
    found.loss.sum().backward()
    assert old.grad is None and returns.grad is None
    torch.testing.assert_close(new.grad, torch.where(found.clipped, 0.0, (new - returns).detach()))
    assert found.clipped.any() and not found.clipped.all()


def test_token_weights_by_hand() -> None:
    lengths = torch.tensor([1, 3, 4])
    # 8 tokens: 1/8 each.  3 rollouts: 1/(3*1), 1/(3*3), 1/(3*4)
    assert token_weights(lengths, aggregation="token_mean").tolist() == [0.125, 0.125, 0.125]
    found = token_weights(lengths, aggregation="sequence_mean", dtype=torch.float64)
    assert found.tolist() == pytest.approx([1 / 3, 1 / 9, 1 / 12], rel=1e-15)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 11])
def test_the_loss_of_a_step_does_not_depend_on_its_microbatches(aggregation: str, cut: int) -> None:
    rng = random.Random(2)
    losses = [[rng.uniform(-1, 1) for _ in range(rng.randint(1, 9))] for _ in range(11)]
    weights = token_weights(torch.tensor([len(x) for x in losses]), aggregation=aggregation, dtype=torch.float64)
    order = list(range(11))
    rng.shuffle(order)
    total = 0.0
    for start in range(0, 11, cut):
        rows = order[start : start + cut]
        flat = torch.tensor([x for row in rows for x in losses[row]], dtype=torch.float64)
        per_token = weights[rows].repeat_interleave(torch.tensor([len(losses[row]) for row in rows]))
        total += (per_token * flat).sum().item()
    assert total == pytest.approx(rl_oracles.aggregate(losses, aggregation=aggregation), abs=1e-13)


def test_token_weights_laws() -> None:
    lengths, order = torch.tensor([5, 1, 2, 8]), torch.tensor([3, 0, 1, 2])
    for name in ("token_mean", "sequence_mean"):
        weights = token_weights(lengths, aggregation=name, dtype=torch.float64)
        assert (weights * lengths).sum().item() == pytest.approx(1.0)  # a constant loss is its own mean
        assert torch.equal(token_weights(lengths[order], aggregation=name, dtype=torch.float64), weights[order])
    even = torch.tensor([4, 4])
    by_token, by_sequence = (token_weights(even, aggregation=name) for name in ("token_mean", "sequence_mean"))
    assert torch.equal(by_token, by_sequence)


def test_the_two_aggregations_can_differ_in_sign() -> None:
    losses = [[1.0], [-0.4, -0.4, -0.4, -0.4]]
    # tokens: (1 - 1.6) / 5 = -0.12;  sequences: (1 - 0.4) / 2 = 0.3
    assert rl_oracles.aggregate(losses, aggregation="token_mean") == pytest.approx(-0.12)
    assert rl_oracles.aggregate(losses, aggregation="sequence_mean") == pytest.approx(0.3)


def test_token_weights_pass_gradients_as_the_mean_does() -> None:
    x = randn(5, seed=1).requires_grad_()
    lengths = torch.tensor([2, 3])
    weights = token_weights(lengths, aggregation="sequence_mean", dtype=torch.float64).repeat_interleave(lengths)
    assert gradcheck(lambda y: (weights * y**2).sum(), (x,))
    ((x[:2] ** 2).mean() / 2 + (x[2:] ** 2).mean() / 2).backward()
    torch.testing.assert_close(x.grad, weights * 2 * x.detach())


def test_what_cannot_be_weighted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one token in each rollout, found \[2, 0\]"):
        token_weights(torch.tensor([2, 0]), aggregation="token_mean")
    with pytest.raises(ValueError, match=r"found \[\]"):
        token_weights(torch.tensor([], dtype=torch.long), aggregation="token_mean")
    with pytest.raises(ValueError, match="expected token_mean or sequence_mean, found 'sum'"):
        token_weights(torch.tensor([2]), aggregation="sum")  # type: ignore[arg-type]
