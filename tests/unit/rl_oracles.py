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


def whiten(xs: list[float], *, correction: int = 1, eps: float = 1e-8, eps_rule: str = "add") -> list[float]:
    """(x - mean) / sqrt(variance + eps), or / sqrt(max(variance, eps))."""
    centre, spread = mean(xs), variance(xs, correction=correction)
    scale = math.sqrt(spread + eps if eps_rule == "add" else max(spread, eps))
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


def leave_one_out(rewards: list[float], groups: list[int]) -> list[float]:
    """Each reward minus the mean of the others in its group."""
    result = []
    for b, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and i != b]
        result.append(reward - mean(others) if others else 0.0)
    return result


def returns_to_go(rewards: list[float], *, discount: float) -> list[float]:
    """Of one rollout: the sum of the discounted rewards from each token on."""
    return [math.fsum(discount ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def overlong(length: int, *, longest: int, buffer: int, factor: float) -> float:
    """DAPO, eq. 13, case by case."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return factor * ((longest - buffer) - length) / buffer
    return -factor


def kl(logprob: float, ref_logprob: float, *, estimator: str, limit: float = math.inf) -> float:
    """One token's k1, k2 or k3, cut to +-limit."""
    d = logprob - ref_logprob
    if estimator == "k3":
        d = min(max(d, -20.0), 20.0)
    estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
    return min(max(estimate, -limit), limit)


def token_rewards(reward: float, old: list[float], ref: list[float], *, kl_coef: float, estimator: str) -> list[float]:
    """One rollout's token rewards."""
    shaped = [-kl_coef * kl(o, r, estimator=estimator) for o, r in zip(old, ref, strict=True)]
    if shaped:
        shaped[-1] += reward
    return shaped


def policy_loss(
    logprob: float, old: float, advantage: float, *, clip_low: float, clip_high: float, dual_clip: float = math.inf
) -> float:
    """One token's PPO loss: minus the smaller of the two surrogates, for A < 0 no smaller than dual_clip * A."""
    ratio = math.exp(min(max(logprob - old, -20.0), 20.0))
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    smaller = min(ratio * advantage, bounded * advantage)
    return -max(smaller, dual_clip * advantage) if advantage < 0 else -smaller


def gspo(logprobs: list[float], old: list[float], advantage: float, *, clip_low: float, clip_high: float) -> float:
    """One completion's loss: the clipped surrogate of the geometric mean of the tokens' ratios."""
    ratio = math.prod(math.exp(x - y) for x, y in zip(logprobs, old, strict=True)) ** (1 / len(old))
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    return -min(ratio * advantage, bounded * advantage)


def cispo(logprob: float, old: float, advantage: float, *, clip_low: float, clip_high: float) -> float:
    """One token's loss: the clipped weight times the advantage times the log-probability."""
    return -min(max(math.exp(logprob - old), 1 - clip_low), 1 + clip_high) * advantage * logprob


def mismatch_weights(
    old: list[float], rollout: list[float], *, level: str, form: str, low: float, high: float
) -> list[float]:
    """One completion's weights."""
    ratios = [math.exp(x - y) for x, y in zip(old, rollout, strict=True)]
    whole = math.prod(ratios)
    gates = {
        "token": ratios,
        "sequence": [whole] * len(ratios),
        "sequence_mean": [whole ** (1 / len(ratios))] * len(ratios),
    }[level]
    weights = [whole] * len(ratios) if level == "sequence" else ratios
    if form == "truncate":
        return [min(max(w, low), high) for w in weights]
    return [w if low <= gate <= high else 0.0 for w, gate in zip(weights, gates, strict=True)]


def value_loss(new: float, old: float, target: float, *, value_clip: float) -> float:
    """One token's clipped value loss."""
    near = min(max(new, old - value_clip), old + value_clip)
    return 0.5 * max((new - target) ** 2, (near - target) ** 2)


def bradley_terry(chosen: list[float], rejected: list[float], *, margin: float, label_smoothing: float) -> list[float]:
    """Each pair's cross-entropy between (1 - eps, eps) and the model's chances that chosen beats rejected or not."""
    result = []
    for better, worse in zip(chosen, rejected, strict=True):
        chance = 1 / (1 + math.exp(-(better - worse - margin)))
        loss = 0.0
        for label, wins in ((1 - label_smoothing, chance), (label_smoothing, 1 - chance)):
            loss -= label * math.log(wins)
        result.append(loss)
    return result


def centering(chosen: list[float], rejected: list[float]) -> list[float]:
    """Four times the square of each pair's middle."""
    return [4 * ((better + worse) / 2) ** 2 for better, worse in zip(chosen, rejected, strict=True)]


def aggregate(losses: list[list[float]], *, aggregation: str, horizon: int = 1) -> float:
    """The loss of a step from the token losses of each rollout."""
    if aggregation == "token_mean":
        return mean([x for rollout in losses for x in rollout])
    if aggregation == "sequence_mean":
        return mean([mean(rollout) for rollout in losses])
    total = mean([math.fsum(rollout) for rollout in losses])
    return total / horizon if aggregation == "constant" else total
