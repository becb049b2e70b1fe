"""stages/rl/advantages.py without a critic: leave-one-out, REINFORCE++ and its baseline, Dr. GRPO, cumulated KL."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.autograd import gradcheck

from stages.rl.advantages import (
    group_advantages,
    leave_one_out_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    returns_to_go,
)
from stages.rl.credit import KlPenalty, group_credit
from stages.rl.whitening import Whitening
from tests.unit import rl_oracles
from tests.unit.rl_tensors import LENGTHS, MASK_BT, close, f64, random_BT

RULES = [None, Whitening(), Whitening("biased", 0.5, "maximum"), Whitening("unbiased", 0.1)]
GROUPS = torch.tensor([0, 0, 1, 1])


def test_leave_one_out_by_hand() -> None:
    rewards, groups = f64([1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 8.0]), torch.tensor([7, 7, 7, 7, 2, 2, 5])
    # group 7: the others of a 1 have mean 1/3, of a 0 have 2/3; group 2: 3 - 1 and 1 - 3; a group of one: nothing
    close(leave_one_out_advantages(rewards, group_B=groups), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 2, -2, 0])


def test_leave_one_out_agrees_with_the_oracle_and_with_the_scaled_mean() -> None:
    rng = random.Random(1)
    groups = [rng.randrange(12) for _ in range(60)]
    rewards = [rng.choice([0.0, 0.1, 1.0]) for _ in range(60)]
    found = leave_one_out_advantages(f64(rewards), group_B=torch.tensor(groups))
    close(found, rl_oracles.leave_one_out(rewards, groups))
    even = f64([rng.gauss(0, 1) for _ in range(12)])
    fours = torch.arange(12) // 4
    # (r - mean) * G / (G - 1): how verl writes it
    close(
        leave_one_out_advantages(even, group_B=fours),
        group_advantages(even, group_B=fours, scale_by_std=False) * 4 / 3,
    )


def test_leave_one_out_laws() -> None:
    rewards, groups = torch.randn(12, generator=torch.Generator().manual_seed(1)).double(), torch.arange(12) // 4
    base = leave_one_out_advantages(rewards, group_B=groups)
    close(leave_one_out_advantages(rewards + f64([9.0, -3.0, 0.1])[groups], group_B=groups), base, tolerance=1e-9)
    close(base.view(3, 4).sum(dim=1), [0, 0, 0])
    close(leave_one_out_advantages(5 * rewards, group_B=groups), 5 * base)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    close(leave_one_out_advantages(rewards[order], group_B=groups[order]), base[order])
    assert leave_one_out_advantages(f64([0.1] * 7), group_B=torch.zeros(7).long()).tolist() == [0.0] * 7
    # the baseline does not see its own reward: d A_b / d r_b = 1
    rewards.requires_grad_()
    jacobian = torch.autograd.functional.jacobian(lambda r: leave_one_out_advantages(r, group_B=groups), rewards)
    close(jacobian.diagonal(), [1.0] * 12)
    assert gradcheck(lambda r: leave_one_out_advantages(r, group_B=groups), (rewards,))


def test_returns_to_go_by_hand_and_by_oracle() -> None:
    found = returns_to_go(f64([[1.0, 2.0, 4.0, 9.0]]), mask_BT=torch.tensor([[1, 1, 1, 0]]), discount=0.5)
    # 4;  2 + 0.5*4 = 4;  1 + 0.5*4 = 3
    close(found, [[3, 4, 4, 0]])
    close(returns_to_go(f64([[1.0, 9.0, 4.0]]), mask_BT=torch.tensor([[1, 0, 1]]), discount=0.5), [[3, 0, 4]])
    rewards = random_BT(3)
    found = returns_to_go(rewards, mask_BT=MASK_BT, discount=0.9)
    for b, n in enumerate(LENGTHS):
        close(found[b, :n], rl_oracles.returns_to_go(rewards[b, :n].tolist(), discount=0.9))
        assert not found[b, n:].any()
    dirty = rewards.where(MASK_BT, torch.tensor(math.nan, dtype=torch.float64))
    close(returns_to_go(dirty, mask_BT=MASK_BT, discount=0.9), found)
    assert gradcheck(lambda r: returns_to_go(r, mask_BT=MASK_BT, discount=0.9), (rewards.requires_grad_(),))


@pytest.mark.parametrize("rule", RULES)
def test_reinforce_pp_agrees_with_the_oracle(rule: Whitening | None) -> None:
    rewards = random_BT(3)
    found = reinforce_pp_advantages(rewards, mask_BT=MASK_BT, discount=0.9, whitening=rule)
    flat = [x for b, n in enumerate(LENGTHS) for x in rl_oracles.returns_to_go(rewards[b, :n].tolist(), discount=0.9)]
    if rule is not None:
        correction = 1 if rule.variance == "unbiased" else 0
        flat = rl_oracles.whiten(flat, correction=correction, eps=rule.eps, eps_rule=rule.eps_rule)
    close(found[MASK_BT], flat)
    assert not found[~MASK_BT].any()


def test_reinforce_pp_by_hand() -> None:
    found = reinforce_pp_advantages(
        f64([[0.0, 1.0], [3.0, 0.0]]),
        mask_BT=torch.tensor([[1, 1], [1, 0]]),
        discount=1.0,
        whitening=Whitening(eps=0.0),
    )
    # returns 1, 1 and 3: mean 5/3, Bessel variance (4/9 + 4/9 + 16/9) / 2 = 4/3
    close(found, [[-2 / 3 / math.sqrt(4 / 3)] * 2, [4 / 3 / math.sqrt(4 / 3), 0]])


@pytest.mark.parametrize("rule", RULES)
def test_reinforce_pp_baseline_agrees_with_the_oracle(rule: Whitening | None) -> None:
    rewards = [1.0, -2.0, 0.5, 0.0]
    found = reinforce_pp_baseline_advantages(f64(rewards), group_B=GROUPS, mask_BT=MASK_BT, whitening=rule)
    centred = rl_oracles.group_advantages(rewards, GROUPS.tolist(), scale_by_std=False)
    flat = [a for a, n in zip(centred, LENGTHS, strict=True) for _ in range(n)]
    if rule is not None:
        correction = 1 if rule.variance == "unbiased" else 0
        flat = rl_oracles.whiten(flat, correction=correction, eps=rule.eps, eps_rule=rule.eps_rule)
    close(found[MASK_BT], flat)


def test_reinforce_pp_laws_and_gradients() -> None:
    rewards, placed = f64([1.0, -2.0, 0.5, 0.0]).requires_grad_(), random_BT(3).requires_grad_()
    arguments = {"mask_BT": MASK_BT, "whitening": Whitening()}
    base = reinforce_pp_baseline_advantages(rewards, group_B=GROUPS, **arguments)
    shifted = reinforce_pp_baseline_advantages(rewards + f64([5.0, 5.0, -1.0, -1.0]), group_B=GROUPS, **arguments)
    close(shifted, base.detach())  # what is common to a group is no credit
    close(base.sum(), 0.0)
    scaled = reinforce_pp_advantages(40 * placed, discount=0.9, **arguments)
    close(scaled, reinforce_pp_advantages(placed, discount=0.9, **arguments).detach(), tolerance=1e-7)
    assert gradcheck(lambda r: reinforce_pp_baseline_advantages(r, group_B=GROUPS, **arguments), (rewards,))
    assert gradcheck(lambda r: reinforce_pp_advantages(r, discount=0.9, **arguments), (placed,))


def test_dr_grpo_is_the_centred_reward_whatever_the_spread() -> None:
    rewards = f64([1.0, 0.0, 0.0, 0.0, 10.0, 0.0, 0.0, 0.0])
    groups = torch.arange(8) // 4
    by_hand = [0.75, -0.25, -0.25, -0.25, 7.5, -2.5, -2.5, -2.5]
    close(group_advantages(rewards, group_B=groups, scale_by_std=False), by_hand)
    scaled = group_advantages(rewards, group_B=groups, scale_by_std=True, eps=0.0)
    close(scaled[:4], scaled[4:])  # GRPO forgets how much there was to win: 1.5 and -0.5 in both


def test_a_group_of_one_is_raw_where_verl_says_so() -> None:
    rewards, groups = f64([3.0, 1.0, 0.0]), torch.tensor([0, 1, 1])
    for scale, expected in ((True, 3.0 / 1.5), (False, 3.0)):
        found = group_advantages(rewards, group_B=groups, scale_by_std=scale, eps=0.5, singleton="raw")
        close(found[0], expected)
        close(found[1:], group_advantages(rewards, group_B=groups, scale_by_std=scale, eps=0.5)[1:])


def test_a_cumulated_kl_makes_advantages_vary_inside_a_completion() -> None:
    old, ref = f64([[-1.0, -1.0], [-1.0, -1.0]]), f64([[-2.0, -4.0], [-1.0, 9.0]])
    mask, groups, rewards = torch.tensor([[1, 1], [1, 0]]), torch.zeros(2).long(), f64([1.0, 0.0])
    kl = KlPenalty(0.1, "k1", old, ref)
    arguments = {"group_B": groups, "mask_BT": mask, "kl": kl, "scale_by_std": False}
    cumulated = group_credit(rewards, **arguments, cumulate_kl=True)
    # baseline 0.5; k1 1 and 3, 0. From each token on: 0.5 - 0.1 - 0.3 and 0.5 - 0.3; -0.5
    close(cumulated.advantages_BT, [[0.1, 0.2], [-0.5, 0.0]])
    summed = group_credit(rewards, **arguments)
    # shaped 1 - 0.4 = 0.6 and 0: mean 0.3
    close(summed.advantages_BT, [[0.3, 0.3], [-0.3, 0.0]])
    clipped = group_credit(rewards, **arguments, reward_clip=0.2)
    close(clipped.advantages_BT, [[0.2, 0.2], [-0.2, 0.0]])  # the clip sees the reward less the baseline
    without = group_credit(rewards, **(arguments | {"kl": None}), cumulate_kl=True)
    close(without.advantages_BT, group_credit(rewards, **(arguments | {"kl": None})).advantages_BT)
