"""From rewards to credit: GAE, returns to go, and the baselines of groups.

Pure functions on tensors. B rollouts, T completion tokens, right-padded; a mask is 1 on completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stages.rl.whitening import Whitening, whiten_by

Gaps = Literal["skip", "zero"]
Singleton = Literal["zero", "raw"]


@dataclass(frozen=True, slots=True)
class GaeEstimate:
    """advantages_BT: credit. returns_BT: value targets, advantages + values. Both 0 outside the mask."""

    advantages_BT: Tensor
    returns_BT: Tensor


def gae_advantages(
    token_rewards_BT: Tensor,
    *,
    values_BT: Tensor,
    mask_BT: Tensor,
    discount: float,
    gae_lambda: float,
    gaps: Gaps = "skip",
) -> GaeEstimate:
    """Generalised advantage estimation. [B, T] -> two of [B, T].

    delta_t = r_t + discount * V_{t+1} - V_t,  A_t = delta_t + discount * gae_lambda * A_{t+1},  R_t = A_t + V_t,
    with V and A zero after the last token (Schulman et al. 2016, eq. 16).

    Tokens outside the mask are skipped as if they were not there ("skip": verl, NeMo-RL), or count as steps with
    reward and value 0 ("zero": OpenRLHF). The two agree wherever the mask has no gaps.
    """
    mask_BT = mask_BT.bool()
    zero_B = torch.zeros_like(values_BT[:, 0])
    next_value_B, next_advantage_B = zero_B, zero_B
    reversed_T: list[Tensor] = []
    for t in reversed(range(values_BT.shape[1])):
        mask_B = mask_BT[:, t]
        value_B = torch.where(mask_B, values_BT[:, t], zero_B)
        delta_B = torch.where(mask_B, token_rewards_BT[:, t], zero_B) + discount * next_value_B - value_B
        advantage_B = delta_B + discount * gae_lambda * next_advantage_B
        reversed_T.append(torch.where(mask_B, advantage_B, zero_B))
        counts_B = mask_B if gaps == "skip" else torch.ones_like(mask_B)
        next_advantage_B = torch.where(counts_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(counts_B, value_B, next_value_B)
    advantages_BT = torch.stack(reversed_T[::-1], dim=1)
    returns_BT = torch.where(mask_BT, advantages_BT + values_BT, torch.zeros_like(values_BT))
    return GaeEstimate(advantages_BT=advantages_BT, returns_BT=returns_BT)


def returns_to_go(token_rewards_BT: Tensor, *, mask_BT: Tensor, discount: float) -> Tensor:
    """G_t = r_t + discount * G_{t+1}, tokens outside the mask skipped; 0 there. [B, T] -> [B, T].

    REINFORCE's return. With the KL in the reward it is what OpenRLHF takes for every estimator but GAE, so that its
    group_norm advantages vary inside a completion.
    """
    mask_BT = mask_BT.bool()
    zero_B = torch.zeros_like(token_rewards_BT[:, 0])
    following_B = zero_B
    reversed_T: list[Tensor] = []
    for t in reversed(range(token_rewards_BT.shape[1])):
        return_B = token_rewards_BT[:, t] + discount * following_B
        reversed_T.append(torch.where(mask_BT[:, t], return_B, zero_B))
        following_B = torch.where(mask_BT[:, t], return_B, following_B)
    return torch.stack(reversed_T[::-1], dim=1)


def group_advantages(
    rewards_B: Tensor, *, group_B: Tensor, scale_by_std: bool, eps: float = 1e-6, singleton: Singleton = "zero"
) -> Tensor:
    """A_b = r_b - mean(group of b), divided by (std(group of b) + eps) if `scale_by_std`. [B], [B] long -> [B].

    Shao et al. 2024 (GRPO, eq. 1) divide; Liu et al. 2025 (Dr. GRPO) do not. std is unbiased (Bessel) as in OpenRLHF,
    TRL and verl, whose eps are 1e-9, 1e-4 and 1e-6. A group of equal rewards carries no signal: its advantages are
    exactly 0. So does a group of one, unless `singleton` is "raw": mean 0 and std 1, as in verl.
    """
    groups = _Groups(group_B)
    count_B = groups.total(torch.ones_like(rewards_B))
    centred_B = rewards_B - groups.total(rewards_B) / count_B
    silent_B = groups.silent(rewards_B)
    if scale_by_std:
        variance_B = groups.total(centred_B.square()) / (count_B - 1).clamp(min=1)
        safe_B = torch.where(silent_B, torch.ones_like(variance_B), variance_B)
        centred_B = centred_B / (safe_B.sqrt() + eps)
    centred_B = torch.where(silent_B, torch.zeros_like(centred_B), centred_B)
    if singleton == "raw":
        centred_B = torch.where(count_B == 1, rewards_B / (1.0 + eps if scale_by_std else 1.0), centred_B)
    return centred_B


def leave_one_out_advantages(rewards_B: Tensor, *, group_B: Tensor) -> Tensor:
    """A_b = r_b - mean of the others in b's group = (r_b - mean(group)) * G / (G - 1). [B], [B] long -> [B].

    RLOO (Ahmadian et al. 2024, eq. 5): the baseline does not depend on the rollout's own reward, so the gradient is
    unbiased. The same in OpenRLHF, TRL and verl. A group of one, or of equal rewards, gives exactly 0.
    """
    groups = _Groups(group_B)
    count_B = groups.total(torch.ones_like(rewards_B))
    others_B = (groups.total(rewards_B) - rewards_B) / (count_B - 1).clamp(min=1)
    return torch.where(groups.silent(rewards_B), torch.zeros_like(rewards_B), rewards_B - others_B)


def reinforce_pp_advantages(
    token_rewards_BT: Tensor, *, mask_BT: Tensor, discount: float, whitening: Whitening | None
) -> Tensor:
    """REINFORCE++: whiten(G_t) over the tensor, G_t = `returns_to_go`. [B, T] -> [B, T].

    Hu et al. 2025, eq. 3: no critic and no group; the KL (k1) is in the reward. OpenRLHF's "reinforce", verl's
    "reinforce_plus_plus", which whiten by their own rules.
    """
    returns_BT = returns_to_go(token_rewards_BT, mask_BT=mask_BT, discount=discount)
    return whiten_by(whitening, returns_BT, mask_BT=mask_BT)


def reinforce_pp_baseline_advantages(
    rewards_B: Tensor, *, group_B: Tensor, mask_BT: Tensor, whitening: Whitening | None
) -> Tensor:
    """REINFORCE++-baseline: the group's mean is the baseline, the whole round the scale. [B], [B], [B, T] -> [B, T].

    whiten(r_b - mean(group of b), spread over b's tokens) (Hu et al. 2025, section 3.2); the KL belongs in the loss
    (k2 or k3). verl's "reinforce_plus_plus_baseline", OpenRLHF's "reinforce_baseline".
    """
    centred_B = group_advantages(rewards_B, group_B=group_B, scale_by_std=False)
    return whiten_by(whitening, spread(centred_B, mask_BT=mask_BT), mask_BT=mask_BT)


def spread(advantages_B: Tensor, *, mask_BT: Tensor) -> Tensor:
    """A_bt = A_b on every token of rollout b, 0 outside the mask. [B], [B, T] -> [B, T]."""
    return torch.where(mask_BT.bool(), advantages_B[:, None], torch.zeros_like(advantages_B)[:, None])


class _Groups:
    """Which rollouts belong together. Figures of a group stand at each of its rollouts: [B]."""

    def __init__(self, group_B: Tensor) -> None:
        _, self._index_B = torch.unique(group_B, return_inverse=True)
        self._count = int(self._index_B.max()) + 1

    def total(self, x_B: Tensor) -> Tensor:
        """Sum over the group."""
        zeros = torch.zeros(self._count, dtype=x_B.dtype, device=x_B.device)
        return zeros.index_add(0, self._index_B, x_B)[self._index_B]

    def silent(self, x_B: Tensor) -> Tensor:
        """Whether all of the group are equal, exactly: bool."""
        lowest, highest = (
            torch.zeros(self._count, dtype=x_B.dtype, device=x_B.device).scatter_reduce(
                0, self._index_B, x_B.detach(), how, include_self=False
            )
            for how in ("amin", "amax")
        )
        return (lowest == highest)[self._index_B]
