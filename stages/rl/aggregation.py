"""The weights that turn the token losses of a whole optimizer step into one number.

They know the whole step, so the result does not depend on how it is cut into microbatches and ranks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


def token_weights(
    lengths_B: Tensor,
    *,
    aggregation: Aggregation,
    dtype: torch.dtype = torch.float32,
    horizon_tokens: int | None = None,
    included_B: Tensor | None = None,
) -> Tensor:
    """The weight w_b of every token of rollout b, for the rollouts of one whole optimizer step. [B] -> [B].

    sum_b w_b sum_t loss_bt is the loss of the step:
    token_mean: w_b = 1 / sum_b len_b (DAPO; default of OpenRLHF, verl and TRL's GRPO);
    sequence_mean: w_b = 1 / (B len_b) (Shao et al. 2024, eq. 3);
    sequence_sum: w_b = 1 / B (verl's seq-mean-token-sum; long completions weigh more);
    constant: w_b = 1 / (B horizon_tokens) (Liu et al. 2025, Dr. GRPO; TRL's dr_grpo, verl's seq-mean-token-sum-norm).

    `lengths_B` counts completion tokens over all microbatches and ranks; each takes its own rollouts' weights.
    For flat tokens: weights_B.repeat_interleave(lengths_B). `included_B`: the others have weight 0 and are in none of
    the counts above. Raises ValueError for an included rollout without tokens.
    """
    included = torch.ones_like(lengths_B, dtype=torch.bool) if included_B is None else included_B.bool()
    if lengths_B.numel() == 0 or bool((lengths_B[included] < 1).any()):
        raise ValueError(f"lengths_B: expected at least one token in each rollout, found {lengths_B.tolist()}")
    lengths, count = lengths_B.to(torch.float64), included.sum().clamp(min=1)
    match aggregation:
        case "token_mean":
            weights_B = torch.ones_like(lengths) / lengths[included].sum().clamp(min=1)
        case "sequence_mean":
            weights_B = 1.0 / (lengths * count)
        case "sequence_sum":
            weights_B = torch.ones_like(lengths) / count
        case "constant":
            if horizon_tokens is None or horizon_tokens < 1:
                raise ValueError(
                    f"horizon_tokens: expected at least 1 for aggregation constant, found {horizon_tokens}"
                )
            weights_B = torch.ones_like(lengths) / (count * horizon_tokens)
        case _:
            raise ValueError(
                f"aggregation: expected token_mean, sequence_mean, sequence_sum or constant, found {aggregation!r}"
            )
    return torch.where(included, weights_B, torch.zeros_like(weights_B)).to(dtype)
