"""stages/rl/rewards.py: worked numbers, slow oracles, laws, gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from stages.rl.rewards import place_rewards, token_rewards
from tests.unit import rl_oracles

LENGTHS = [5, 1, 3, 4]
MASK_BT = torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def f64(*rows: object) -> Tensor:
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64)


def random_BT(seed: int) -> Tensor:
    return torch.randn(MASK_BT.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, expected: object, *, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


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
