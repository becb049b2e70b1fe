"""When the generator's probabilities are not the trainer's: importance weights, and how far apart the two are.

The generator (vLLM) samples with rollout_logprobs, the trainer recomputes old_logprobs of the same tokens with the
same weights; rounding and stale weights set them apart. Flat tokens, completions one after another. No gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stages.rl.kl import LOG_RATIO_LIMIT, cut, kl_k3
from stages.rl.losses import completion_mean, completion_sum

MismatchLevel = Literal["token", "sequence", "sequence_mean"]
MismatchForm = Literal["truncate", "mask"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Per token. kl: k3 of KL(rollout || old). gap: |old_logprobs - rollout_logprobs|. weight: old / rollout."""

    kl: Tensor
    gap: Tensor
    weight: Tensor


def mismatch(old_logprobs: Tensor, *, rollout_logprobs: Tensor) -> Mismatch:
    """How far the trainer is from the generator, per token. Any shape -> same shape."""
    old, rollout = old_logprobs.detach(), rollout_logprobs.detach()
    weight = cut(old - rollout, limit=LOG_RATIO_LIMIT).exp()
    return Mismatch(kl=kl_k3(rollout, ref_logprobs=old), gap=(old - rollout).abs(), weight=weight)


def mismatch_weights(
    old_logprobs_N: Tensor,
    *,
    rollout_logprobs_N: Tensor,
    lengths_B: Tensor,
    level: MismatchLevel,
    form: MismatchForm,
    low: float,
    high: float,
) -> Tensor:
    """The weight that each token's policy loss is multiplied with. [N], lengths [B] -> [N].

    w = exp(old - rollout) of the token; of the sum over the completion ("sequence": unbiased, of high variance); or
    gated by the completion's mean ("sequence_mean"). |log w| is cut to 20.
    truncate: min(w, high) (Espeholt et al. 2018; Yao et al. 2025, "TIS"; verl with high 2). OpenRLHF also lifts w to
    `low`, the others do not: low 0 is TIS.
    mask: w where low <= w <= high, else 0 (IcePop; TRL's sequence_mask with high 3 and low 0). "sequence_mean" only
    masks: tokens keep their own w in completions whose geometric mean lies inside (OpenRLHF's seq).
    """
    log_N = (old_logprobs_N - rollout_logprobs_N).detach()
    token_N = cut(log_N, limit=LOG_RATIO_LIMIT).exp()
    match level:
        case "token":
            gate_N = weight_N = token_N
        case "sequence":
            gate_N = weight_N = cut(completion_sum(log_N, lengths_B=lengths_B), limit=LOG_RATIO_LIMIT).exp()
        case "sequence_mean":
            mean_N = completion_mean(log_N, lengths_B=lengths_B)
            gate_N, weight_N = cut(mean_N, limit=LOG_RATIO_LIMIT).exp(), token_N
        case _:
            raise ValueError(f"level: expected token, sequence or sequence_mean, found {level!r}")
    if form == "mask":
        return torch.where((gate_N >= low) & (gate_N <= high), weight_N, torch.zeros_like(weight_N))
    if form != "truncate" or level == "sequence_mean":
        raise ValueError(f"form: expected mask{'' if level == 'sequence_mean' else ' or truncate'}, found {form!r}")
    return weight_N.clamp(low, high)
