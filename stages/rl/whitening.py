"""Whitening: which variance, how eps enters, whether the mean stays. Its scope is the tensor that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stages.rl.masked import Variance, masked_mean, masked_variance

EpsRule = Literal["add", "maximum"]


@dataclass(frozen=True, slots=True)
class Whitening:
    """A rule. variance: "unbiased" is Bessel's. eps: with "add" under the root, with "maximum" the least variance.

    TRL and verl: unbiased, add 1e-8. OpenRLHF: biased, maximum 1e-8. OpenRLHF and synchronous verl whiten the whole
    round at once, TRL the rollouts of one rank.
    """

    variance: Variance = "unbiased"
    eps: float = 1e-8
    eps_rule: EpsRule = "add"


def whiten(
    x_BT: Tensor,
    *,
    mask_BT: Tensor,
    variance: Variance = "unbiased",
    eps: float = 1e-8,
    eps_rule: EpsRule = "add",
    keep_mean: bool = False,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the mask, or / sqrt(max(variance, eps)); 0 outside it. [B, T] -> [B, T].

    `keep_mean` adds the mean again, as TRL does where it whitens rewards.
    """
    mean = masked_mean(x_BT, mask=mask_BT)
    spread = masked_variance(x_BT, mask=mask_BT, variance=variance)
    match eps_rule:
        case "add":
            scale = torch.rsqrt(spread + eps)
        case "maximum":
            scale = torch.rsqrt(spread.clamp(min=eps))
        case _:
            raise ValueError(f"eps_rule: expected add or maximum, found {eps_rule!r}")
    white_BT = (x_BT - mean) * scale + (mean if keep_mean else 0.0)
    return torch.where(mask_BT.bool(), white_BT, torch.zeros_like(x_BT))


def whiten_by(rule: Whitening | None, x_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """`whiten` by a rule; without one, x inside the mask as it is. [B, T] -> [B, T]."""
    if rule is None:
        return torch.where(mask_BT.bool(), x_BT, torch.zeros_like(x_BT))
    return whiten(x_BT, mask_BT=mask_BT, variance=rule.variance, eps=rule.eps, eps_rule=rule.eps_rule)
