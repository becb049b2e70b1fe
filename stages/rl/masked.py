"""Statistics of the entries that a mask selects. Entries outside the mask never count, not even where they are NaN."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Variance = Literal["unbiased", "biased"]


def masked_mean(x: Tensor, *, mask: Tensor) -> Tensor:
    """Mean of the selected entries: sum_i m_i x_i / sum_i m_i. Any shape -> scalar; 0 where nothing is selected."""
    selected = mask.bool()
    return torch.where(selected, x, torch.zeros_like(x)).sum() / selected.sum().clamp(min=1)


def masked_variance(x: Tensor, *, mask: Tensor, variance: Variance = "unbiased") -> Tensor:
    """Variance of the selected entries: sum_i m_i (x_i - mean)^2 / (N - c), N = sum_i m_i. Any shape -> scalar.

    "unbiased" is Bessel's c = 1 (TRL, verl), "biased" is c = 0 (OpenRLHF). Fewer than c + 1 entries give 0.
    """
    selected = mask.bool()
    centred = torch.where(selected, x - masked_mean(x, mask=mask), torch.zeros_like(x))
    correction = 1 if variance == "unbiased" else 0
    return centred.square().sum() / (selected.sum() - correction).clamp(min=1)


def explained_variance(values_BT: Tensor, *, returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """How much of the returns the critic foresaw: 1 - Var[R - V] / Var[R], over the mask. Scalar.

    1 is a perfect critic, 0 one that says a constant, below 0 a harmful one; 0 where the returns do not vary.
    The ratio does not depend on Bessel's correction. As in OpenAI baselines and CleanRL.
    """
    total = masked_variance(returns_BT, mask=mask_BT)
    left = masked_variance(returns_BT - values_BT, mask=mask_BT)
    return torch.where(total > 0, 1 - left / total, torch.zeros_like(total))
