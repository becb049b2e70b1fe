"""The losses of the policy and the critic, per token, and the weights that aggregate them over an optimizer step.

A loss here has the shape of its inputs, whatever that is, so that microbatches of flat tokens can be summed: the
weights know the whole step, and the result does not depend on how it is cut into microbatches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stages.rl.kl import LOG_RATIO_LIMIT

Aggregation = Literal["token_mean", "sequence_mean"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per token. loss: to be weighted and summed. ratio: pi / pi_old, no gradient. clipped: where the clip acted."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Per token. loss: to be weighted and summed. clipped: where the clip acted."""

    loss: Tensor
    clipped: Tensor


def policy_loss_clip(
    logprobs: Tensor, *, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """max(-rho * A, -clip(rho, 1 - clip_low, 1 + clip_high) * A), rho = exp(logprobs - old_logprobs). Elementwise.

    Schulman et al. 2017, eq. 7; clip_high above clip_low is DAPO's clip-higher (Yu et al. 2025). The log-ratio is
    cut to +-20 as in OpenRLHF and verl; TRL does not. verl also bounds the loss for A < 0 (dual clip 3.0).
    Gradient flows to `logprobs` alone.
    """
    advantages = advantages.detach()
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return PolicyLoss(loss=torch.maximum(free, bounded), ratio=ratio.detach(), clipped=bounded > free)


def value_loss_clip(new_values: Tensor, *, values: Tensor, returns: Tensor, value_clip: float) -> ValueLoss:
    """0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2). Elementwise.

    The same in OpenRLHF, TRL and verl, which clip by 0.5, 0.2 and 0.5. Gradient flows to `new_values` alone.
    """
    values, returns = values.detach(), returns.detach()
    free = (new_values - returns).square()
    near = torch.maximum(torch.minimum(new_values, values + value_clip), values - value_clip)
    bounded = (near - returns).square()
    return ValueLoss(loss=0.5 * torch.maximum(free, bounded), clipped=bounded > free)


def token_weights(lengths_B: Tensor, *, aggregation: Aggregation, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight w_b of every token of rollout b, for the rollouts of one whole optimizer step. [B] -> [B].

    sum_b w_b sum_t loss_bt is the loss of the step:
    token_mean: w_b = 1 / sum_b len_b (DAPO; default of OpenRLHF, verl and TRL's GRPO);
    sequence_mean: w_b = 1 / (B len_b) (Shao et al. 2024, eq. 3).

    `lengths_B` counts completion tokens over all microbatches and ranks; each takes its own rollouts' weights.
    For flat tokens: weights_B.repeat_interleave(lengths_B). Raises ValueError for a rollout without tokens.
    """
    if lengths_B.numel() == 0 or int(lengths_B.min()) < 1:
        raise ValueError(f"lengths_B: expected at least one token in each rollout, found {lengths_B.tolist()}")
    lengths = lengths_B.to(torch.float64)
    match aggregation:
        case "token_mean":
            weights_B = torch.ones_like(lengths) / lengths.sum()
        case "sequence_mean":
            weights_B = 1.0 / (lengths * lengths.numel())
        case _:
            raise ValueError(f"aggregation: expected token_mean or sequence_mean, found {aggregation!r}")
    return weights_B.to(dtype)
