"""stages/rl/advantages.py: worked numbers, slow oracles, laws, gradients in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from stages.rl.advantages import gae_advantages, group_advantages
from tests.unit import rl_oracles
from tests.unit.rl_tensors import LENGTHS, MASK_BT, close, f64, random_BT

# gae_advantages


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor = MASK_BT, discount: float = 0.9, lam: float = 0.8):  # type: ignore[no-untyped-def]
    return gae_advantages(rewards_BT, values_BT=values_BT, mask_BT=mask_BT, discount=discount, gae_lambda=lam)


def test_gae_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 0]])
    found = gae(f64([[0.0, 0.0, 1.0, 7.0]]), f64([[0.5, 0.6, 0.8, 7.0]]), mask, discount=0.5, lam=0.5)
    # delta_2 = 1 - 0.8 = 0.2;  delta_1 = 0.5*0.8 - 0.6 = -0.2;  delta_0 = 0.5*0.6 - 0.5 = -0.2
    # A_2 = 0.2;  A_1 = -0.2 + 0.25*0.2 = -0.15;  A_0 = -0.2 + 0.25*-0.15 = -0.2375
    close(found.advantages_BT, [[-0.2375, -0.15, 0.2, 0.0]])
    # R = A + V: -0.2375 + 0.5, -0.15 + 0.6, 0.2 + 0.8
    close(found.returns_BT, [[0.2625, 0.45, 1.0, 0.0]])


def test_gae_agrees_with_the_oracle() -> None:
    rewards, values = random_BT(3), random_BT(4)
    found = gae(rewards, values)
    for b, n in enumerate(LENGTHS):
        advantages, returns = rl_oracles.gae(
            rewards[b, :n].tolist(), values[b, :n].tolist(), discount=0.9, gae_lambda=0.8
        )
        close(found.advantages_BT[b, :n], advantages)
        close(found.returns_BT[b, :n], returns)
        assert not found.advantages_BT[b, n:].any() and not found.returns_BT[b, n:].any()


def test_gae_lambda_1_is_reward_to_go_and_lambda_0_is_one_step() -> None:
    rewards, values = random_BT(3), random_BT(4)
    monte_carlo = gae(rewards, values, discount=1.0, lam=1.0)
    togo = (rewards * MASK_BT).flip(1).cumsum(1).flip(1) * MASK_BT
    close(monte_carlo.returns_BT, togo)
    one_step = gae(rewards, values, discount=0.9, lam=0.0)
    following = torch.cat([(values * MASK_BT)[:, 1:], torch.zeros(4, 1, dtype=torch.float64)], dim=1)
    close(one_step.returns_BT, (rewards + 0.9 * following) * MASK_BT)


def test_gae_of_a_perfect_critic_is_zero() -> None:
    rewards = random_BT(3) * MASK_BT
    togo = rewards.flip(1).cumsum(1).flip(1)
    close(gae(rewards, togo, discount=1.0, lam=0.95).advantages_BT, torch.zeros(4, 5))


def test_gae_is_linear() -> None:
    r1, v1, r2, v2 = (random_BT(seed) for seed in range(4))
    both = gae(2 * r1 - 3 * r2, 2 * v1 - 3 * v2).advantages_BT
    close(both, 2 * gae(r1, v1).advantages_BT - 3 * gae(r2, v2).advantages_BT)


@pytest.mark.parametrize("filler", [0.0, 1e30, math.nan, math.inf])
def test_gae_padding_neither_counts_nor_shows(filler: float) -> None:
    rewards, values = random_BT(3), random_BT(4)
    expected = gae(rewards, values)
    wide_mask = torch.cat([MASK_BT, torch.zeros(4, 3, dtype=torch.bool)], dim=1)
    wide = [torch.nn.functional.pad(x, (0, 3)).where(wide_mask, torch.tensor(filler)) for x in (rewards, values)]
    found = gae(wide[0], wide[1], wide_mask)
    close(found.advantages_BT[:, :5], expected.advantages_BT)
    close(found.returns_BT[:, :5], expected.returns_BT)
    assert not found.advantages_BT[:, 5:].any()


def test_gae_skips_gaps_as_if_they_were_not_there() -> None:
    rewards, values = random_BT(3)[:1], random_BT(4)[:1]
    mask = torch.tensor([[1, 0, 1, 0, 1]])
    kept = [0, 2, 4]
    found = gae(rewards, values, mask).advantages_BT
    expected, _ = rl_oracles.gae(rewards[0, kept].tolist(), values[0, kept].tolist(), discount=0.9, gae_lambda=0.8)
    close(found[0, kept], expected)


def test_gae_counts_gaps_as_empty_steps_where_openrlhf_does() -> None:
    found = gae_advantages(
        f64([[0.0, 7.0, 1.0]]),
        values_BT=f64([[0.5, 7.0, 0.8]]),
        mask_BT=torch.tensor([[1, 0, 1]]),
        discount=0.5,
        gae_lambda=0.5,
        gaps="zero",
    )
    # delta_2 = 0.2;  the gap: 0 + 0.5*0.8 - 0 = 0.4, A_1 = 0.4 + 0.25*0.2 = 0.45;  A_0 = 0 - 0.5 + 0.25*0.45
    close(found.advantages_BT, [[-0.3875, 0, 0.2]])
    rewards, values = random_BT(3), random_BT(4)
    plain = {"values_BT": values, "mask_BT": MASK_BT, "discount": 0.9, "gae_lambda": 0.8}
    without_gaps = gae_advantages(rewards, **plain, gaps="zero").advantages_BT
    close(without_gaps, gae_advantages(rewards, **plain, gaps="skip").advantages_BT)


def test_gae_rollouts_do_not_mix() -> None:
    rewards, values, order = random_BT(3), random_BT(4), torch.tensor([2, 0, 3, 1])
    shuffled = gae(rewards[order], values[order], MASK_BT[order])
    close(shuffled.advantages_BT, gae(rewards, values).advantages_BT[order])


def test_gae_gradients() -> None:
    rewards, values = random_BT(3).requires_grad_(), random_BT(4).requires_grad_()
    assert gradcheck(lambda r, v: gae(r, v).advantages_BT, (rewards, values))
    assert gradcheck(lambda r, v: gae(r, v).returns_BT, (rewards, values))


# group_advantages


def test_group_advantages_by_hand() -> None:
    rewards, groups = f64([1.0, 0.0, 0.0, 1.0, 3.0, 1.0]), torch.tensor([7, 7, 7, 7, 2, 2])
    # group 7: mean 0.5, deviations +-0.5; group 2: mean 2, deviations +-1
    close(group_advantages(rewards, group_B=groups, scale_by_std=False), [0.5, -0.5, -0.5, 0.5, 1.0, -1.0])
    # group 7: Bessel variance 4*0.25/3 = 1/3, std 0.57735, 0.5/0.57735 = 0.866025; group 2: variance 2, 1/1.414214
    scaled = group_advantages(rewards, group_B=groups, scale_by_std=True, eps=0.0)
    close(scaled, [0.8660254, -0.8660254, -0.8660254, 0.8660254, 0.70710678, -0.70710678], tolerance=1e-7)
    # eps widens the divisor: 0.5 / (0.57735 + 0.1)
    wide = group_advantages(rewards, group_B=groups, scale_by_std=True, eps=0.1)
    close(wide[0], 0.5 / (math.sqrt(1 / 3) + 0.1))


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_group_advantages_agree_with_the_oracle(scale_by_std: bool) -> None:
    rng = random.Random(1)
    groups = [rng.randrange(12) * 1000 for _ in range(60)]
    rewards = [rng.choice([0.0, 0.1, 1.0]) for _ in range(60)]
    found = group_advantages(f64(rewards), group_B=torch.tensor(groups), scale_by_std=scale_by_std)
    close(found, rl_oracles.group_advantages(rewards, groups, scale_by_std=scale_by_std), tolerance=1e-9)


def test_group_advantages_laws() -> None:
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    groups = torch.arange(12) // 4
    shift = f64([100.0, -3.0, 0.1])[groups]
    for scale in (False, True):
        base = group_advantages(rewards, group_B=groups, scale_by_std=scale)
        close(group_advantages(rewards + shift, group_B=groups, scale_by_std=scale), base, tolerance=1e-9)
        close(base.view(3, 4).sum(dim=1), [0, 0, 0], tolerance=1e-9)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
        close(group_advantages(rewards[order], group_B=groups[order], scale_by_std=scale), base[order])
        close(group_advantages(rewards, group_B=9 - 5 * groups, scale_by_std=scale), base)
        close(group_advantages(rewards[:4], group_B=groups[:4], scale_by_std=scale), base[:4])
    scaled = group_advantages(rewards, group_B=groups, scale_by_std=True, eps=0.0)
    close(group_advantages(rewards * 50, group_B=groups, scale_by_std=True, eps=0.0), scaled, tolerance=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale_by_std", [False, True])
def test_a_group_without_signal_gets_exactly_zero(dtype: torch.dtype, scale_by_std: bool) -> None:
    rewards = torch.tensor([0.1] * 7 + [0.3], dtype=dtype)  # 0.1 summed seven times and divided is not 0.1
    groups = torch.tensor([0] * 7 + [1])
    found = group_advantages(rewards, group_B=groups, scale_by_std=scale_by_std)
    assert found.tolist() == [0.0] * 8


def test_group_advantages_gradients() -> None:
    rewards = f64([1.0, 0.2, 0.4, 1.5, 3.0, 1.0]).requires_grad_()
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    for scale in (False, True):
        assert gradcheck(lambda r, s=scale: group_advantages(r, group_B=groups, scale_by_std=s), (rewards,))
    flat = f64([0.5, 0.5, 0.7]).requires_grad_()
    group_advantages(flat, group_B=torch.tensor([0, 0, 1]), scale_by_std=True).sum().backward()
    close(flat.grad, [0, 0, 0])  # and not NaN, also for a group of one
