"""From a reward per completion to rewards per token: clipping, length penalties, placement, KL shaping.

Pure functions on tensors. B rollouts, T completion tokens, right-padded; a mask is 1 on completion tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stages.rl.kl import KlEstimator, KlLimits, cut, kl_estimate

RewardPlacement = Literal["last_token", "first_pad"]


def clip_rewards(rewards_B: Tensor, *, limit: float | None) -> Tensor:
    """r_b clamped to [-limit, limit]; r_b itself without a limit. [B] -> [B].

    OpenRLHF clips to +-10, and does so *after* a group baseline was taken off, so that it clips advantages there.
    """
    return cut(rewards_B, limit=limit)


def overlong_penalty(
    lengths_B: Tensor, *, max_completion_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Tensor:
    """Soft overlong punishment, to be added to the rewards: 0 up to max_completion_tokens - buffer_tokens, from there
    falling in a straight line to -factor at max_completion_tokens, and -factor beyond. [B] -> [B], float64.

    Yu et al. 2025 (DAPO), eq. 13, with `factor` 1; OpenRLHF and verl scale it likewise. Lengths are in tokens.
    """
    if not 0 < buffer_tokens <= max_completion_tokens:
        raise ValueError(f"buffer_tokens: expected 1 to {max_completion_tokens}, found {buffer_tokens}")
    excess_B = lengths_B.to(torch.float64) - (max_completion_tokens - buffer_tokens)
    return -factor * (excess_B / buffer_tokens).clamp(0.0, 1.0)


def penalise_truncated(rewards_B: Tensor, *, truncated_B: Tensor, penalty: float) -> Tensor:
    """r_b - penalty where a completion was cut before EOS. [B], [B] -> [B]. TRL's missing_eos_penalty."""
    return torch.where(truncated_B.bool(), rewards_B - penalty, rewards_B)


def mask_truncated(mask_BT: Tensor, *, truncated_B: Tensor) -> Tensor:
    """The mask without the completions that were cut before EOS, so that no token of theirs counts anywhere.

    [B, T], [B] -> [B, T] bool. TRL's mask_truncated_completions; the paper's "overlong filtering" (DAPO, 3.4).
    """
    return mask_BT.bool() & ~truncated_B.bool()[:, None]


def first_pad_included(mask_BT: Tensor) -> Tensor:
    """The mask, one position longer where a position is left: the first padding after EOS. [B, T] -> [B, T] bool.

    Where TRL places the reward, reads a value and trains the critic. A completion that fills its row has none. Of a
    rollout without tokens, nothing is included.
    """
    mask = mask_BT.bool()
    last_BT = _is_last(mask)
    return mask | torch.nn.functional.pad(last_BT[:, :-1], (1, 0))


def _is_last(mask_BT: Tensor) -> Tensor:
    """Where the last position of each row's mask is. [B, T] bool -> [B, T] bool."""
    position_T = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)
    last_B = torch.where(mask_BT, position_T, torch.zeros_like(position_T)).amax(dim=1, keepdim=True)
    return mask_BT & (position_T == last_B)


def place_rewards(rewards_B: Tensor, *, mask_BT: Tensor, placement: RewardPlacement = "last_token") -> Tensor:
    """r_bt = r_b at one position, else 0. [B], [B, T] -> [B, T].

    last_token: the last of the mask (OpenRLHF, verl). first_pad: the padding after it where there is one, else the
    last token (TRL). A rollout without tokens gets no reward.
    """
    match placement:
        case "last_token":
            target_BT = _is_last(mask_BT.bool())
        case "first_pad":
            target_BT = _is_last(first_pad_included(mask_BT))
        case _:
            raise ValueError(f"reward_placement: expected last_token or first_pad, found {placement!r}")
    return torch.where(target_BT, rewards_B[:, None], torch.zeros_like(rewards_B)[:, None])


def token_rewards(
    rewards_B: Tensor,
    *,
    mask_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    kl_coef: float,
    kl_estimator: KlEstimator,
    kl_limits: KlLimits | None = None,
    placement: RewardPlacement = "last_token",
) -> Tensor:
    """r_bt = [t is the reward's place] r_b - kl_coef * KL_bt. [B], [B, T] -> [B, T]; the KL is 0 outside the mask.

    KL in the reward (Ziegler et al. 2019; Ouyang et al. 2022, eq. 2), as in OpenRLHF, TRL and verl with k1.
    Carries no gradient: a reward is a number.
    """
    kl_BT = kl_estimate(old_logprobs_BT, ref_logprobs=ref_logprobs_BT, estimator=kl_estimator, limits=kl_limits)
    shaping_BT = torch.where(mask_BT.bool(), -kl_coef * kl_BT.detach(), torch.zeros_like(kl_BT))
    return place_rewards(rewards_B, mask_BT=mask_BT, placement=placement) + shaping_BT
