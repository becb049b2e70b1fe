"""The equations in the order in which a round needs them: rewards -> token rewards -> advantages and returns.

One composition for PPO and one for groups; the stage and the reference program both call these.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stages.rl.advantages import Gaps, Singleton, gae_advantages, group_advantages, returns_to_go, spread
from stages.rl.kl import KlEstimator, KlLimits
from stages.rl.rewards import RewardPlacement, clip_rewards, first_pad_included, place_rewards, token_rewards
from stages.rl.whitening import Whitening, whiten_by


@dataclass(frozen=True, slots=True)
class Credit:
    """token_rewards_BT, advantages_BT: per token. returns_BT: value targets, None without a critic."""

    token_rewards_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KlPenalty:
    """A KL in the reward: coef * estimate(old_logprobs_BT, ref_logprobs_BT), cut by `limits`."""

    coef: float
    estimator: KlEstimator
    old_logprobs_BT: Tensor
    ref_logprobs_BT: Tensor
    limits: KlLimits | None = None


def shape(
    rewards_B: Tensor, *, mask_BT: Tensor, kl: KlPenalty | None, placement: RewardPlacement = "last_token"
) -> Tensor:
    """Token rewards, with the KL where there is one. [B], [B, T] -> [B, T]."""
    if kl is None:
        return place_rewards(rewards_B, mask_BT=mask_BT, placement=placement)
    return token_rewards(
        rewards_B,
        mask_BT=mask_BT,
        old_logprobs_BT=kl.old_logprobs_BT,
        ref_logprobs_BT=kl.ref_logprobs_BT,
        kl_coef=kl.coef,
        kl_estimator=kl.estimator,
        kl_limits=kl.limits,
        placement=placement,
    )


def ppo_credit(
    rewards_B: Tensor,
    *,
    mask_BT: Tensor,
    values_BT: Tensor,
    kl: KlPenalty | None,
    discount: float,
    gae_lambda: float,
    whitening: Whitening | None,
    reward_clip: float | None = None,
    reward_placement: RewardPlacement = "last_token",
    gaps: Gaps = "skip",
) -> Credit:
    """PPO: clip, place, shape, GAE, whiten. [B], [B, T] -> [B, T] each.

    With "first_pad" rewards, values and returns reach one position further than the mask (stages/rl/rewards.py), and
    the advantages, whitened over the mask, do not: TRL.
    """
    rewards_BT = shape(clip_rewards(rewards_B, limit=reward_clip), mask_BT=mask_BT, kl=kl, placement=reward_placement)
    estimate = gae_advantages(
        rewards_BT,
        values_BT=values_BT,
        mask_BT=first_pad_included(mask_BT) if reward_placement == "first_pad" else mask_BT,
        discount=discount,
        gae_lambda=gae_lambda,
        gaps=gaps,
    )
    advantages_BT = whiten_by(whitening, estimate.advantages_BT, mask_BT=mask_BT)
    return Credit(rewards_BT, advantages_BT, estimate.returns_BT)


def group_credit(
    rewards_B: Tensor,
    *,
    group_B: Tensor,
    mask_BT: Tensor,
    kl: KlPenalty | None,
    scale_by_std: bool,
    std_eps: float = 1e-6,
    singleton: Singleton = "zero",
    reward_clip: float | None = None,
    cumulate_kl: bool = False,
) -> Credit:
    """GRPO: the group's baseline, clip, spread over the tokens. [B], [B] long, [B, T] -> [B, T] each.

    A KL in the reward is part of what the baseline sees: r_b - coef * sum_t KL_bt (verl). With `cumulate_kl` the
    baseline sees the reward alone, and the KL from each token on is taken off that token's advantage: OpenRLHF's
    group_norm, whose advantages therefore vary inside a completion and whose token_rewards hold the baseline.
    """
    rewards_BT = shape(rewards_B, mask_BT=mask_BT, kl=kl)
    seen_B = rewards_B if cumulate_kl else rewards_BT.sum(dim=1)
    baseline_B = group_advantages(seen_B, group_B=group_B, scale_by_std=scale_by_std, eps=std_eps, singleton=singleton)
    advantages_B = clip_rewards(baseline_B, limit=reward_clip)
    if not cumulate_kl:
        return Credit(rewards_BT, spread(advantages_B, mask_BT=mask_BT))
    rewards_BT = shape(advantages_B, mask_BT=mask_BT, kl=kl)
    return Credit(rewards_BT, returns_to_go(rewards_BT, mask_BT=mask_BT, discount=1.0))
