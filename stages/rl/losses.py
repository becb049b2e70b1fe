"""The losses of the policy and the critic, per token.

A loss here has the shape of its inputs, whatever that is, so that microbatches of flat tokens can be summed with the
weights of stages/rl/aggregation.py. What concerns whole completions takes flat tokens and the completions' lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stages.rl.kl import LOG_RATIO_LIMIT, cut

PolicyLossName = Literal["clip", "gspo", "cispo", "reinforce"]


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
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    log_ratio_limit: float | None = LOG_RATIO_LIMIT,
) -> PolicyLoss:
    """max(-rho * A, -clip(rho, 1 - clip_low, 1 + clip_high) * A), rho = exp(logprobs - old_logprobs). Elementwise.

    Schulman et al. 2017, eq. 7; clip_high above clip_low is DAPO's clip-higher (Yu et al. 2025). With `dual_clip` c
    the loss where A < 0 is at most -c * A (Ye et al. 2020, eq. 5), as in verl with c = 3; OpenRLHF and TRL have it
    off. The log-ratio is cut to +-20 as in OpenRLHF and verl; TRL does not. Gradient flows to `logprobs` alone.
    """
    advantages = advantages.detach()
    ratio = cut(logprobs - old_logprobs.detach(), limit=log_ratio_limit).exp()
    return _clipped(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def policy_loss_gspo(
    logprobs_N: Tensor,
    *,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    lengths_B: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped loss with the ratio of the whole completion, s_b = exp(mean_t (logprobs - old_logprobs)). [N] -> [N].

    Zheng et al. 2025 (GSPO), eq. 5 to 7, in the per-token form of eq. 13: s_bt = sg[s_b] pi / sg[pi], which has the
    value s_b and, for one advantage per completion and weights of one size inside it, the gradient of s_b. Clips are
    of the order 3e-4. The log-ratio is cut to +-20 (verl: at most 10). Gradient flows to `logprobs_N` alone.
    """
    log_ratio_N = (logprobs_N - old_logprobs_N).detach()
    mean_N = completion_mean(log_ratio_N, lengths_B=lengths_B)
    ratio_N = cut(mean_N, limit=LOG_RATIO_LIMIT).exp() * (logprobs_N - logprobs_N.detach()).exp()
    return _clipped(ratio_N, advantages_N.detach(), clip_low=clip_low, clip_high=clip_high, dual_clip=None)


def _clipped(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    """The pessimistic of the free and the clipped surrogate, and the dual clip on top."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=clipped)


def policy_loss_cispo(
    logprobs: Tensor, *, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-sg[clip(rho, 1 - clip_low, 1 + clip_high)] * A * logprobs. Elementwise.

    MiniMax-M1 (2025), eq. 4 and 5: the importance weight is clipped, and every token keeps its gradient. clip_low of
    1 or more is no lower bound, as in the paper and TRL, which bounds at 5 (clip_high 4). The loss is no surrogate:
    its value says nothing, its gradient -weight * A * grad logprobs does. Gradient flows to `logprobs` alone.
    """
    ratio = cut((logprobs - old_logprobs).detach(), limit=LOG_RATIO_LIMIT).exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(loss=-weight * advantages.detach() * logprobs, ratio=ratio, clipped=weight != ratio)


def policy_loss_reinforce(logprobs: Tensor, *, old_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """-A * logprobs (Williams 1992): no ratio and no clip, for one optimizer step per round. Elementwise.

    `old_logprobs` serve the reported ratio alone. Gradient flows to `logprobs` alone.
    """
    ratio = cut((logprobs - old_logprobs).detach(), limit=LOG_RATIO_LIMIT).exp()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(loss=-advantages.detach() * logprobs, ratio=ratio, clipped=never)


def policy_loss(
    name: PolicyLossName,
    logprobs_N: Tensor,
    *,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    lengths_B: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    log_ratio_limit: float | None = LOG_RATIO_LIMIT,
) -> PolicyLoss:
    """The loss of that name on flat tokens, completions one after another. [N], lengths [B] -> [N]."""
    match name:
        case "clip":
            return policy_loss_clip(
                logprobs_N,
                old_logprobs=old_logprobs_N,
                advantages=advantages_N,
                clip_low=clip_low,
                clip_high=clip_high,
                dual_clip=dual_clip,
                log_ratio_limit=log_ratio_limit,
            )
        case "gspo":
            return policy_loss_gspo(
                logprobs_N,
                old_logprobs_N=old_logprobs_N,
                advantages_N=advantages_N,
                lengths_B=lengths_B,
                clip_low=clip_low,
                clip_high=clip_high,
            )
        case "cispo":
            return policy_loss_cispo(
                logprobs_N,
                old_logprobs=old_logprobs_N,
                advantages=advantages_N,
                clip_low=clip_low,
                clip_high=clip_high,
            )
        case "reinforce":
            return policy_loss_reinforce(logprobs_N, old_logprobs=old_logprobs_N, advantages=advantages_N)
    raise ValueError(f"loss: expected clip, gspo, cispo or reinforce, found {name!r}")


def value_loss_clip(new_values: Tensor, *, values: Tensor, returns: Tensor, value_clip: float | None) -> ValueLoss:
    """0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2). Elementwise.

    The same in OpenRLHF, TRL and verl, which clip by 0.5, 0.2 and 0.5; None does not clip. TRL adds it to the
    policy's loss with weight 0.1, the others have an optimizer for it. Gradient flows to `new_values` alone.
    """
    values, returns = values.detach(), returns.detach()
    free = (new_values - returns).square()
    if value_clip is None:
        return ValueLoss(loss=0.5 * free, clipped=torch.zeros_like(free, dtype=torch.bool))
    near = torch.maximum(torch.minimum(new_values, values + value_clip), values - value_clip)
    bounded = (near - returns).square()
    return ValueLoss(loss=0.5 * torch.maximum(free, bounded), clipped=bounded > free)


def completion_sum(x_N: Tensor, *, lengths_B: Tensor) -> Tensor:
    """The sum over each completion's tokens, at each of its tokens. [N], [B] -> [N]."""
    lengths = lengths_B.to(x_N.device)
    row_N = torch.arange(lengths.numel(), device=x_N.device).repeat_interleave(lengths)
    return torch.zeros(lengths.numel(), dtype=x_N.dtype, device=x_N.device).index_add(0, row_N, x_N)[row_N]


def completion_mean(x_N: Tensor, *, lengths_B: Tensor) -> Tensor:
    """The mean over each completion's tokens, at each of its tokens. [N], [B] -> [N]."""
    lengths = lengths_B.to(x_N.device)
    return completion_sum(x_N, lengths_B=lengths) / lengths.repeat_interleave(lengths)
