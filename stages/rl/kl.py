"""Estimators of KL(policy || reference) from the log-probability of the sampled token, and the adaptive coefficient.

Schulman, "Approximating KL divergence" (2020). With d = log pi(a) - log pi_ref(a), a ~ pi.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""|log-ratio| beyond which exponentials are cut, so that none overflows: as OpenRLHF and verl; TRL has no limit."""

_MAX_RELATIVE_STEP = 0.2


@dataclass(frozen=True, slots=True)
class KlLimits:
    """Where an estimator is cut; None: nowhere. log_ratio: |d| inside k3. k1, k2, k3: the size of the estimate itself.

    OpenRLHF cuts every estimate to +-10, verl k3 alone (with |d| <= 20 inside), TRL nothing. OpenRLHF also keeps
    d >= -10 inside k3, which under its limit of 10 is the same number.
    """

    log_ratio: float | None = LOG_RATIO_LIMIT
    k1: float | None = None
    k2: float | None = None
    k3: float | None = None


def cut(x: Tensor, *, limit: float | None) -> Tensor:
    """x clamped to [-limit, limit]; x itself without a limit. Any shape -> same shape."""
    return x if limit is None else x.clamp(-limit, limit)


def kl_k1(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """k1 = d: unbiased, high variance, may be negative. Any shape -> same shape.

    What OpenRLHF, TRL and verl subtract from the reward. As a *loss* it is useless: the expectation of its gradient
    is zero.
    """
    return logprobs - ref_logprobs.detach()


def kl_k2(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """k2 = d^2 / 2: biased, low variance, never negative. Any shape -> same shape.

    Its gradient, d * grad log pi, is an unbiased estimate of the gradient of the KL.
    """
    return 0.5 * (logprobs - ref_logprobs.detach()).square()


def kl_k3(logprobs: Tensor, *, ref_logprobs: Tensor, log_ratio_limit: float | None = LOG_RATIO_LIMIT) -> Tensor:
    """k3 = exp(-d) - 1 + d: unbiased, lower variance, never negative. Any shape -> same shape.

    GRPO's loss term (Shao et al. 2024, eq. 4). |d| is cut to `log_ratio_limit` first, as in verl; TRL does not cut.
    """
    d = cut(logprobs - ref_logprobs.detach(), limit=log_ratio_limit)
    return torch.expm1(-d) + d


def kl_estimate(
    logprobs: Tensor, *, ref_logprobs: Tensor, estimator: KlEstimator, limits: KlLimits | None = None
) -> Tensor:
    """The estimator of that name, per token, cut as `limits` says (|d| <= 20 inside k3 without them).

    Any shape -> same shape. The reference receives no gradient.
    """
    limits = limits or KlLimits()
    match estimator:
        case "k1":
            return cut(kl_k1(logprobs, ref_logprobs=ref_logprobs), limit=limits.k1)
        case "k2":
            return cut(kl_k2(logprobs, ref_logprobs=ref_logprobs), limit=limits.k2)
        case "k3":
            k3 = kl_k3(logprobs, ref_logprobs=ref_logprobs, log_ratio_limit=limits.log_ratio)
            return cut(k3, limit=limits.k3)
    raise ValueError(f"kl_estimator: expected k1, k2 or k3, found {estimator!r}")


def adaptive_kl_coefficient(
    kl_coef: float, *, kl: float, kl_target: float, kl_horizon: float, num_rollouts: int
) -> float:
    """Controller step: beta' = beta * (1 + clip(kl / kl_target - 1, -0.2, 0.2) * num_rollouts / kl_horizon).

    Ziegler et al. 2019, section 2.2; the same in OpenRLHF and verl, none in TRL. `kl` and `kl_target` are in one
    unit: a mean over rollouts of the KL per token (verl) or per completion (Ziegler). kl_horizon is in rollouts.
    """
    error = min(max(kl / kl_target - 1.0, -_MAX_RELATIVE_STEP), _MAX_RELATIVE_STEP)
    return kl_coef * (1.0 + error * num_rollouts / kl_horizon)
