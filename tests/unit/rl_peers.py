"""What OpenRLHF, verl and TRL publish, written once more as loops in plain Python: no tensors, nothing of stages/rl.

Rows are lists of equal width, padded on the right. OpenRLHF 0.11.2 (experience_maker.py, models/loss.py, models/
utils.py), verl 0.9.1 (core_algos.py, ray_trainer.py), TRL 1.6.0 (ppo_trainer.py) and 1.16.0 (grpo_trainer.py).
"""

from __future__ import annotations

import math
from typing import Any

Rows = list[list[float]]
Case = dict[str, Any]


def _clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _lengths(case: Case) -> list[int]:
    return [sum(row) for row in case["completion_mask"]]


def _zeros(case: Case) -> Rows:
    return [[0.0] * len(row) for row in case["completion_mask"]]


def _groups(case: Case) -> list[list[float]]:
    """For each sequence, the rewards of its group."""
    size, rewards = case["group_size"], case["rewards"]
    return [rewards[b // size * size : b // size * size + size] for b in range(len(rewards))]


def _mean_std(xs: list[float]) -> tuple[float, float]:
    mean = math.fsum(xs) / len(xs)
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in xs) / (len(xs) - 1))


def _token_mean(rows: Rows, lengths: list[int]) -> float:
    return math.fsum(x for row, n in zip(rows, lengths, strict=True) for x in row[:n]) / sum(lengths)


def _gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    advantages, last = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else 0.0
        last = rewards[t] + gamma * following - values[t] + gamma * lam * last
        advantages[t] = last
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def _value_loss(case: Case, returns: Rows, lengths: list[int], clip: float) -> float:
    losses = []
    for new, old, target, n in zip(case["new_values"], case["values"], returns, lengths, strict=True):
        for t in range(n):
            near = _clamp(new[t], old[t] - clip, old[t] + clip)
            losses.append(max((new[t] - target[t]) ** 2, (near - target[t]) ** 2))
    return 0.5 * math.fsum(losses) / len(losses)


def _policy_losses(case: Case, advantages: Rows, *, limit: float, dual_clip: float | None = None) -> Rows:
    rows = _zeros(case)
    for b, n in enumerate(_lengths(case)):
        for t in range(n):
            a = advantages[b][t]
            ratio = math.exp(_clamp(case["logprobs"][b][t] - case["old_logprobs"][b][t], -limit, limit))
            loss = max(-a * ratio, -a * _clamp(ratio, 0.8, 1.2))
            rows[b][t] = min(loss, -a * dual_clip) if dual_clip is not None and a < 0 else loss
    return rows


def _per_token(case: Case, new: str, estimate: Any) -> Rows:
    rows = _zeros(case)
    for b, n in enumerate(_lengths(case)):
        for t in range(n):
            rows[b][t] = estimate(case[new][b][t] - case["ref_logprobs"][b][t])
    return rows


def openrlhf_ppo(case: Case, *, kl_coef: float = 0.01, gamma: float = 1.0, lam: float = 1.0) -> Case:
    """Reward and k1 cut to +-10; whitened by the biased variance, at least 1e-8; value clip 0.5."""
    lengths, kl = _lengths(case), _per_token(case, "old_logprobs", lambda d: _clamp(d, -10, 10))
    rewards, advantages, returns = _zeros(case), _zeros(case), _zeros(case)
    for b, n in enumerate(lengths):
        for t in range(n):
            rewards[b][t] = -kl_coef * kl[b][t] + (_clamp(case["rewards"][b], -10, 10) if t == n - 1 else 0.0)
        advantages[b][:n], returns[b][:n] = _gae(rewards[b][:n], case["values"][b][:n], gamma, lam)
    mean = _token_mean(advantages, lengths)
    variance = _token_mean([[(a - mean) ** 2 for a in row] for row in advantages], lengths)
    for b, n in enumerate(lengths):
        advantages[b][:n] = [(a - mean) / math.sqrt(max(variance, 1e-8)) for a in advantages[b][:n]]
    return {
        "token_rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "policy_loss": _token_mean(_policy_losses(case, advantages, limit=20), lengths),
        "value_loss": _value_loss(case, returns, lengths, 0.5),
        "kl": kl,
    }


def verl_ppo(case: Case, *, kl_coef: float = 0.0, gamma: float = 1.0, lam: float = 1.0) -> Case:
    """KL off unless asked for; Bessel, variance + 1e-8; dual clip 3; value clip 0.5."""
    lengths, kl = _lengths(case), _per_token(case, "old_logprobs", lambda d: d)
    rewards, advantages, returns = _zeros(case), _zeros(case), _zeros(case)
    for b, n in enumerate(lengths):
        rewards[b][n - 1] = case["rewards"][b]
        for t in range(n):
            rewards[b][t] -= kl_coef * kl[b][t]
        advantages[b][:n], returns[b][:n] = _gae(rewards[b][:n], case["values"][b][:n], gamma, lam)
    _bessel_whiten(advantages, lengths)
    return {
        "token_rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "policy_loss": _token_mean(_policy_losses(case, advantages, limit=20, dual_clip=3.0), lengths),
        "value_loss": _value_loss(case, returns, lengths, 0.5),
        "kl": kl,
    }


def trl_ppo(case: Case, *, kl_coef: float = 0.05, gamma: float = 1.0, lam: float = 0.95) -> Case:
    """The reward on the first pad, where values and value loss reach too; nothing cut; value clip 0.2."""
    lengths, kl = _lengths(case), _per_token(case, "old_logprobs", lambda d: d)
    width = len(case["completion_mask"][0])
    longer = [min(n + 1, width) for n in lengths]
    rewards, advantages, returns = _zeros(case), _zeros(case), _zeros(case)
    for b, (n, m) in enumerate(zip(lengths, longer, strict=True)):
        for t in range(n):
            rewards[b][t] = -kl_coef * kl[b][t]
        rewards[b][m - 1] += case["rewards"][b]
        advantages[b][:m], returns[b][:m] = _gae(rewards[b][:m], case["values"][b][:m], gamma, lam)
        advantages[b][n:] = [0.0] * (width - n)
    _bessel_whiten(advantages, lengths)
    return {
        "token_rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "policy_loss": _token_mean(_policy_losses(case, advantages, limit=math.inf), lengths),
        "value_loss": _value_loss(case, returns, longer, 0.2),
        "kl": kl,
    }


def _bessel_whiten(rows: Rows, lengths: list[int]) -> None:
    mean, std = _mean_std([x for row, n in zip(rows, lengths, strict=True) for x in row[:n]])
    for row, n in zip(rows, lengths, strict=True):
        row[:n] = [(x - mean) / math.sqrt(std**2 + 1e-8) for x in row[:n]]


def openrlhf_grpo(case: Case, *, kl_coef: float = 0.01) -> Case:
    """group_norm: the normalised reward is cut to +-10, then the KL from each token on is taken off."""
    lengths, kl = _lengths(case), _per_token(case, "old_logprobs", lambda d: _clamp(d, -10, 10))
    rewards, advantages = _zeros(case), _zeros(case)
    for b, (n, group) in enumerate(zip(lengths, _groups(case), strict=True)):
        mean, std = _mean_std(group)
        for t in range(n):
            rewards[b][t] = -kl_coef * kl[b][t]
        rewards[b][n - 1] += _clamp((case["rewards"][b] - mean) / (std + 1e-9), -10, 10)
        for t in range(n):
            advantages[b][t] = math.fsum(rewards[b][t:n])
    policy_loss = _token_mean(_policy_losses(case, advantages, limit=20), lengths)
    return {
        "token_rewards": rewards,
        "advantages": advantages,
        "returns": advantages,
        "policy_loss": policy_loss,
        "value_loss": None,
        "kl": kl,
    }


def verl_grpo(case: Case, *, kl_coef: float = 0.0) -> Case:
    """eps 1e-6, dual clip 3; with a coefficient, k3 in the loss, cut to 20 inside and 10 outside."""

    def k3(d: float) -> float:
        d = _clamp(-d, -20, 20)
        return _clamp(math.exp(d) - d - 1, -10, 10)

    return _spread_grpo(case, k3, kl_coef=kl_coef, eps=1e-6, limit=20, dual_clip=3.0)


def trl_grpo(case: Case, *, kl_coef: float = 0.0) -> Case:
    """eps 1e-4; with beta, k3 in the loss; nothing cut; normalised by the tokens of the batch (loss_type dapo)."""
    return _spread_grpo(case, lambda d: math.exp(-d) + d - 1, kl_coef=kl_coef, eps=1e-4, limit=math.inf, dual_clip=None)


def _spread_grpo(case: Case, k3: Any, *, kl_coef: float, eps: float, limit: float, dual_clip: float | None) -> Case:
    lengths, kl = _lengths(case), _per_token(case, "logprobs", k3)
    rewards, advantages = _zeros(case), _zeros(case)
    for b, (n, group) in enumerate(zip(lengths, _groups(case), strict=True)):
        mean, std = _mean_std(group)
        rewards[b][n - 1] = case["rewards"][b]
        advantages[b][:n] = [(case["rewards"][b] - mean) / (std + eps)] * n
    losses = _policy_losses(case, advantages, limit=limit, dual_clip=dual_clip)
    return {
        "token_rewards": rewards,
        "advantages": advantages,
        "returns": advantages,
        "policy_loss": _token_mean(losses, lengths) + kl_coef * _token_mean(kl, lengths),
        "value_loss": None,
        "kl": kl,
    }
