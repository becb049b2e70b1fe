"""The equations of stages/rl once more, slowly: plain Python, one rollout or token at a time, no tensors."""

from __future__ import annotations

import math


def gae(
    token_rewards: list[float], values: list[float], *, discount: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns of one rollout, by the sum A_t = sum_k (discount * gae_lambda)^k delta_{t+k}."""
    count = len(values)
    following = [*values[1:], 0.0]
    deltas = [token_rewards[t] + discount * following[t] - values[t] for t in range(count)]
    advantages = [sum((discount * gae_lambda) ** (s - t) * deltas[s] for s in range(t, count)) for t in range(count)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def mean(xs: list[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(xs) / len(xs)


def variance(xs: list[float], *, correction: int = 1) -> float:
    """Variance; `correction` 1 is Bessel's."""
    centre = mean(xs)
    return math.fsum((x - centre) ** 2 for x in xs) / (len(xs) - correction)


def whiten(xs: list[float], *, correction: int = 1, eps: float = 1e-8) -> list[float]:
    """(x - mean) / sqrt(variance + eps)."""
    centre, scale = mean(xs), math.sqrt(variance(xs, correction=correction) + eps)
    return [(x - centre) / scale for x in xs]


def explained_variance(values: list[float], returns: list[float]) -> float:
    """1 - Var[R - V] / Var[R]."""
    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(returns)


def group_advantages(rewards: list[float], groups: list[int], *, scale_by_std: bool, eps: float = 1e-6) -> list[float]:
    """Each reward minus its group's mean, over the group's Bessel std + eps if asked."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if max(members) == min(members):
            result.append(0.0)
            continue
        centred = reward - mean(members)
        result.append(centred / (math.sqrt(variance(members)) + eps) if scale_by_std else centred)
    return result


def kl(logprob: float, ref_logprob: float, *, estimator: str) -> float:
    """One token's k1, k2 or k3."""
    d = logprob - ref_logprob
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    d = min(max(d, -20.0), 20.0)
    return math.exp(-d) - 1 + d


def token_rewards(reward: float, old: list[float], ref: list[float], *, kl_coef: float, estimator: str) -> list[float]:
    """One rollout's token rewards."""
    shaped = [-kl_coef * kl(o, r, estimator=estimator) for o, r in zip(old, ref, strict=True)]
    if shaped:
        shaped[-1] += reward
    return shaped


def policy_loss(logprob: float, old: float, advantage: float, *, clip_low: float, clip_high: float) -> float:
    """One token's PPO loss: minus the smaller of the two surrogates."""
    ratio = math.exp(min(max(logprob - old, -20.0), 20.0))
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    return -min(ratio * advantage, bounded * advantage)


def value_loss(new: float, old: float, target: float, *, value_clip: float) -> float:
    """One token's clipped value loss."""
    near = min(max(new, old - value_clip), old + value_clip)
    return 0.5 * max((new - target) ** 2, (near - target) ** 2)


def aggregate(losses: list[list[float]], *, aggregation: str) -> float:
    """The loss of a step from the token losses of each rollout."""
    if aggregation == "token_mean":
        return mean([x for rollout in losses for x in rollout])
    return mean([mean(rollout) for rollout in losses])
