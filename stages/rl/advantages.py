"""From rewards to credit per token: placement, KL shaping, GAE, group baselines, whitening.

Pure functions on tensors. B rollouts, T completion tokens, right-padded; a mask is 1 on completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.rl.kl import KlEstimator, kl_estimate
from stages.rl.masked import Variance, masked_mean, masked_variance


@dataclass(frozen=True, slots=True)
class GaeEstimate:
    """advantages_BT: credit. returns_BT: value targets, advantages + values. Both 0 outside the mask."""

    advantages_BT: Tensor
    returns_BT: Tensor


def place_rewards(rewards_B: Tensor, *, mask_BT: Tensor) -> Tensor:
    """r_bt = r_b at the last token of the mask, else 0. [B], [B, T] -> [B, T].

    OpenRLHF and verl put it there; TRL one position later (on the padding after EOS) where there is one.
    A rollout without tokens gets no reward.
    """
    mask = mask_BT.bool()
    position_T = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last_B = torch.where(mask, position_T, torch.zeros_like(position_T)).amax(dim=1, keepdim=True)
    is_last_BT = mask & (position_T == last_B)
    return torch.where(is_last_BT, rewards_B[:, None], torch.zeros_like(rewards_B)[:, None])


def token_rewards(
    rewards_B: Tensor,
    *,
    mask_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    kl_coef: float,
    kl_estimator: KlEstimator,
) -> Tensor:
    """r_bt = [t is the last token] r_b - kl_coef * KL_bt. [B], [B, T] -> [B, T]; 0 outside the mask.

    KL in the reward (Ziegler et al. 2019; Ouyang et al. 2022, eq. 2), as in OpenRLHF, TRL and verl with k1.
    Carries no gradient: a reward is a number.
    """
    kl_BT = kl_estimate(old_logprobs_BT, ref_logprobs=ref_logprobs_BT, estimator=kl_estimator).detach()
    shaping_BT = torch.where(mask_BT.bool(), -kl_coef * kl_BT, torch.zeros_like(kl_BT))
    return place_rewards(rewards_B, mask_BT=mask_BT) + shaping_BT


def shaped_rewards(
    rewards_B: Tensor,
    *,
    mask_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    kl_coef: float,
    kl_estimator: KlEstimator,
) -> Tensor:
    """r_b - kl_coef * sum_t KL_bt: the sum of the token rewards. [B], [B, T] -> [B].

    What a group baseline sees when the KL is placed in the reward (TRL's RLOO). OpenRLHF's group_norm instead
    accumulates the KL backwards, so that its advantages vary inside a completion.
    """
    return token_rewards(
        rewards_B,
        mask_BT=mask_BT,
        old_logprobs_BT=old_logprobs_BT,
        ref_logprobs_BT=ref_logprobs_BT,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
    ).sum(dim=1)


def gae_advantages(
    token_rewards_BT: Tensor, *, values_BT: Tensor, mask_BT: Tensor, discount: float, gae_lambda: float
) -> GaeEstimate:
    """Generalised advantage estimation. [B, T] -> two of [B, T].

    delta_t = r_t + discount * V_{t+1} - V_t,  A_t = delta_t + discount * gae_lambda * A_{t+1},  R_t = A_t + V_t,
    with V and A zero after the last token (Schulman et al. 2016, eq. 16).

    Tokens outside the mask are skipped as if they were not there, as in verl and NeMo-RL; OpenRLHF runs through
    them as zeros. The two agree wherever the mask has no gaps.
    """
    mask_BT = mask_BT.bool()
    zero_B = torch.zeros_like(values_BT[:, 0])
    next_value_B, next_advantage_B = zero_B, zero_B
    reversed_T: list[Tensor] = []
    for t in reversed(range(values_BT.shape[1])):
        mask_B = mask_BT[:, t]
        delta_B = token_rewards_BT[:, t] + discount * next_value_B - values_BT[:, t]
        advantage_B = delta_B + discount * gae_lambda * next_advantage_B
        reversed_T.append(torch.where(mask_B, advantage_B, zero_B))
        next_advantage_B = torch.where(mask_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_B, values_BT[:, t], next_value_B)
    advantages_BT = torch.stack(reversed_T[::-1], dim=1)
    returns_BT = torch.where(mask_BT, advantages_BT + values_BT, torch.zeros_like(values_BT))
    return GaeEstimate(advantages_BT=advantages_BT, returns_BT=returns_BT)


def group_advantages(rewards_B: Tensor, *, group_B: Tensor, scale_by_std: bool, eps: float = 1e-6) -> Tensor:
    """A_b = r_b - mean(group of b), divided by (std(group of b) + eps) if `scale_by_std`. [B], [B] long -> [B].

    Shao et al. 2024 (GRPO) divide; Liu et al. 2025 (Dr. GRPO) do not. std is unbiased (Bessel) as in OpenRLHF,
    TRL and verl, whose eps are 1e-9, 1e-4 and 1e-6. A group of equal rewards, or of one rollout, carries no
    signal: its advantages are exactly 0 (verl gives a group of one its raw reward; OpenRLHF refuses it).
    """
    _, index_B = torch.unique(group_B, return_inverse=True)
    num_groups = int(index_B.max()) + 1

    def per_group(x_B: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=x_B.dtype, device=x_B.device).index_add(0, index_B, x_B)

    count_B = per_group(torch.ones_like(rewards_B))[index_B]
    centred_B = rewards_B - per_group(rewards_B)[index_B] / count_B
    lowest, highest = (
        torch.zeros_like(rewards_B[:num_groups]).scatter_reduce(0, index_B, rewards_B, how, include_self=False)
        for how in ("amin", "amax")
    )
    no_signal_B = (lowest == highest)[index_B]
    if scale_by_std:
        variance_B = per_group(centred_B.square())[index_B] / (count_B - 1).clamp(min=1)
        safe_B = torch.where(no_signal_B, torch.ones_like(variance_B), variance_B)
        centred_B = centred_B / (safe_B.sqrt() + eps)
    return torch.where(no_signal_B, torch.zeros_like(centred_B), centred_B)


def whiten(x_BT: Tensor, *, mask_BT: Tensor, variance: Variance = "unbiased", eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the mask; 0 outside it. [B, T] -> [B, T].

    "unbiased" (Bessel) as TRL and verl, "biased" as OpenRLHF (which takes max(variance, eps) instead of adding).
    Over the whole round, as OpenRLHF and synchronous verl; TRL whitens the batch of one rank.
    """
    centred_BT = x_BT - masked_mean(x_BT, mask=mask_BT)
    scale = torch.rsqrt(masked_variance(x_BT, mask=mask_BT, variance=variance) + eps)
    return torch.where(mask_BT.bool(), centred_BT * scale, torch.zeros_like(x_BT))
