"""Estimators of KL(policy || reference) from the log-probability of the sampled token, and the adaptive coefficient.

Schulman, "Approximating KL divergence" (2020). With d = log pi(a) - log pi_ref(a), a ~ pi.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""|log-ratio| beyond which exponentials are cut, so that none overflows: as OpenRLHF and verl; TRL has no limit."""

_MAX_RELATIVE_STEP = 0.2


def kl_k1(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """k1 = d: unbiased, high variance, may be negative. Any shape -> same shape.

    What OpenRLHF (clamped to +-10 there), TRL and verl subtract from the reward. As a *loss* it is useless: the
    expectation of its gradient is zero.
    """
    return logprobs - ref_logprobs.detach()


def kl_k2(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """k2 = d^2 / 2: biased, low variance, never negative. Any shape -> same shape.

    Its gradient, d * grad log pi, is an unbiased estimate of the gradient of the KL.
    """
    return 0.5 * (logprobs - ref_logprobs.detach()).square()


def kl_k3(logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
    """k3 = exp(-d) - 1 + d: unbiased, lower variance, never negative. Any shape -> same shape.

    GRPO's loss term (Shao et al. 2024, eq. 4). d is cut to +-20 as in verl, which also cuts k3 to +-10; TRL cuts
    neither.
    """
    d = (logprobs - ref_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-d) + d


def kl_estimate(logprobs: Tensor, *, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator of that name, per token. Any shape -> same shape. The reference receives no gradient."""
    match estimator:
        case "k1":
            return kl_k1(logprobs, ref_logprobs=ref_logprobs)
        case "k2":
            return kl_k2(logprobs, ref_logprobs=ref_logprobs)
        case "k3":
            return kl_k3(logprobs, ref_logprobs=ref_logprobs)
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
