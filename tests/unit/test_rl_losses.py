"""stages/rl/losses.py: worked numbers, slow oracles, laws, gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from stages.rl.losses import PolicyLoss, policy_loss_clip, value_loss_clip
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
