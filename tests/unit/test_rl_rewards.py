"""stages/rl/rewards.py: worked numbers, slow oracles, laws, gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from stages.rl.kl import KlLimits
from stages.rl.rewards import (
    clip_rewards,
    first_pad_included,
    mask_truncated,
    overlong_penalty,
    penalise_truncated,
    place_rewards,
    token_rewards,
)
from tests.unit import rl_oracles
from tests.unit.rl_tensors import LENGTHS, MASK_BT, close, f64, random_BT


def test_rewards_land_on_the_last_token_of_the_mask() -> None:
    placed = place_rewards(f64([2.0, -1.0, 5.0]), mask_BT=torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]))
    # two tokens; three tokens; none, so the reward lands nowhere
    close(placed, [[0, 2, 0], [0, 0, -1], [0, 0, 0]])


def test_rewards_land_on_the_last_token_even_behind_a_gap() -> None:
    close(place_rewards(f64([3.0]), mask_BT=torch.tensor([[1, 0, 1, 0]])), [[0, 0, 3, 0]])


def test_token_rewards_by_hand() -> None:
    found = token_rewards(
        f64([1.0]),
        mask_BT=torch.tensor([[1, 1, 0]]),
        old_logprobs_BT=f64([[-1.0, -2.0, 9.0]]),
        ref_logprobs_BT=f64([[-1.5, -1.0, math.nan]]),
        kl_coef=0.1,
        kl_estimator="k1",
    )
    # k1: -1 - -1.5 = 0.5; -2 - -1 = -1. Shaping: -0.05, +0.1. Reward 1 on the last token: 1.1. Padding: 0, not NaN.
    close(found, [[-0.05, 1.1, 0.0]])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_token_rewards_agree_with_the_oracle(estimator: str) -> None:
    old, ref, rewards = random_BT(1), random_BT(2), f64([1.0, -2.0, 0.5, 0.0])
    arguments = {"mask_BT": MASK_BT, "old_logprobs_BT": old, "ref_logprobs_BT": ref, "kl_coef": 0.3}
    found = token_rewards(rewards, **arguments, kl_estimator=estimator)
    for b, n in enumerate(LENGTHS):
        expected = rl_oracles.token_rewards(
            rewards[b].item(), old[b, :n].tolist(), ref[b, :n].tolist(), kl_coef=0.3, estimator=estimator
        )
        close(found[b, :n], expected)
        assert not found[b, n:].any()


def test_token_rewards_laws() -> None:
    old, rewards = random_BT(1), f64([1.0, -2.0, 0.5, 0.0])
    arguments = {"mask_BT": MASK_BT, "old_logprobs_BT": old, "kl_estimator": "k1"}
    same = token_rewards(rewards, ref_logprobs_BT=old, kl_coef=9.0, **arguments)
    free = token_rewards(rewards, ref_logprobs_BT=random_BT(2), kl_coef=0.0, **arguments)
    close(same, place_rewards(rewards, mask_BT=MASK_BT))
    close(free, place_rewards(rewards, mask_BT=MASK_BT))
    close(same.sum(dim=1), rewards)


def test_rewards_pass_gradients_to_nothing_but_the_reward() -> None:
    old, ref = random_BT(1).requires_grad_(), random_BT(2).requires_grad_()
    rewards = f64([1.0, -2.0, 0.5, 0.0]).requires_grad_()
    arguments = {"mask_BT": MASK_BT, "old_logprobs_BT": old, "ref_logprobs_BT": ref, "kl_coef": 0.3}
    token_rewards(rewards, **arguments, kl_estimator="k3").sum().backward()
    assert old.grad is None and ref.grad is None
    close(rewards.grad, [1, 1, 1, 1])
    assert gradcheck(lambda r: place_rewards(r, mask_BT=MASK_BT), (rewards,))
    assert gradcheck(lambda r: token_rewards(r, **arguments, kl_estimator="k2"), (rewards,))


def test_the_first_pad_is_behind_the_last_token_where_there_is_one() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
    placed = place_rewards(f64([2.0, -1.0, 5.0, 7.0]), mask_BT=mask, placement="first_pad")
    # one behind two tokens; on the last of a full row; behind the last even after a gap; no tokens, no reward
    close(placed, [[0, 0, 2, 0], [0, 0, 0, -1], [0, 0, 0, 5], [0, 0, 0, 0]])
    expected = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]]
    assert first_pad_included(mask).long().tolist() == expected
    close(placed.sum(dim=1), [2, -1, 5, 0])
    with pytest.raises(ValueError, match="reward_placement: expected last_token or first_pad, found 'eos'"):
        place_rewards(f64([1.0] * 4), mask_BT=mask, placement="eos")  # type: ignore[arg-type]


def test_the_placement_moves_the_reward_and_not_the_kl() -> None:
    old, ref, rewards = random_BT(1), random_BT(2), f64([1.0, -2.0, 0.5, 0.0])
    arguments = {"mask_BT": MASK_BT, "old_logprobs_BT": old, "ref_logprobs_BT": ref, "kl_coef": 0.3}
    last = token_rewards(rewards, **arguments, kl_estimator="k1")
    first = token_rewards(rewards, **arguments, kl_estimator="k1", placement="first_pad")
    moved = place_rewards(rewards, mask_BT=MASK_BT, placement="first_pad") - place_rewards(rewards, mask_BT=MASK_BT)
    close(first - last, moved)
    assert gradcheck(lambda r: place_rewards(r, mask_BT=MASK_BT, placement="first_pad"), (rewards.requires_grad_(),))


def test_the_kl_in_the_reward_is_cut_where_the_convention_cuts() -> None:
    found = token_rewards(
        f64([0.0]),
        mask_BT=torch.tensor([[1, 1]]),
        old_logprobs_BT=f64([[0.0, -14.0]]),
        ref_logprobs_BT=f64([[-12.0, 0.0]]),
        kl_coef=0.5,
        kl_estimator="k1",
        kl_limits=KlLimits(k1=10.0),
    )
    close(found, [[-5.0, 5.0]])  # k1 12 and -14, cut to 10 and -10


def test_reward_clipping() -> None:
    rewards = f64([-12.0, -10.0, 0.5, 10.5]).requires_grad_()
    close(clip_rewards(rewards, limit=10.0), [-10, -10, 0.5, 10])
    assert clip_rewards(rewards, limit=None) is rewards
    close(clip_rewards(clip_rewards(rewards, limit=3.0), limit=3.0), clip_rewards(rewards, limit=3.0))
    close(clip_rewards(-rewards, limit=3.0), -clip_rewards(rewards, limit=3.0))
    assert gradcheck(lambda r: clip_rewards(r, limit=3.0), (f64([-12.0, 1.0, 4.0]).requires_grad_(),))


def test_overlong_penalty_by_hand() -> None:
    found = overlong_penalty(torch.tensor([10, 16, 17, 18, 20, 25]), max_completion_tokens=20, buffer_tokens=4)
    # free up to 16; 17: -1/4; 18: -2/4; 20: -1; beyond: -1
    close(found, [0, 0, -0.25, -0.5, -1, -1])


def test_overlong_penalty_agrees_with_the_oracle_and_falls() -> None:
    lengths = torch.arange(1, 40)
    found = overlong_penalty(lengths, max_completion_tokens=30, buffer_tokens=7, factor=1.5)
    close(found, [rl_oracles.overlong(n, longest=30, buffer=7, factor=1.5) for n in lengths.tolist()])
    assert (found.diff() <= 0).all() and found.min() == -1.5 and found.max() == 0
    close(overlong_penalty(lengths, max_completion_tokens=30, buffer_tokens=7, factor=3.0), 2 * found)
    for wrong in (0, 31):
        with pytest.raises(ValueError, match=f"buffer_tokens: expected 1 to 30, found {wrong}"):
            overlong_penalty(lengths, max_completion_tokens=30, buffer_tokens=wrong)


def test_truncated_completions_are_penalised_or_masked() -> None:
    rewards, truncated = f64([1.0, -2.0, 0.5, 0.0]).requires_grad_(), torch.tensor([0, 1, 0, 1])
    close(penalise_truncated(rewards, truncated_B=truncated, penalty=0.75), [1, -2.75, 0.5, -0.75])
    close(penalise_truncated(rewards, truncated_B=truncated, penalty=0.0), rewards.detach())
    assert gradcheck(lambda r: penalise_truncated(r, truncated_B=truncated, penalty=0.75), (rewards,))
    masked = mask_truncated(MASK_BT, truncated_B=truncated)
    assert masked.sum(dim=1).tolist() == [5, 0, 3, 0]
    assert torch.equal(mask_truncated(MASK_BT, truncated_B=0 * truncated), MASK_BT)
