"""What "PPO" and "GRPO" mean in OpenRLHF, verl, TRL and here: every choice of the mathematics, by name.

Plain numbers and names, without libraries: configs fill in their defaults from here, and stages.rl.reference, the one
program of stages/rl, evaluates them. Read from OpenRLHF 0.11.2, verl 0.9.1, TRL 1.6.0 (PPO) and 1.16.0 (GRPO).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

ConventionName = Literal["openrlhf", "verl", "trl", "ratchet"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlacement = Literal["reward", "loss"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Variance = Literal["unbiased", "biased"]
EpsRule = Literal["add", "maximum"]
Scope = Literal["round", "rank"]
RewardPlacement = Literal["last_token", "first_pad"]
Gaps = Literal["skip", "zero"]
Singleton = Literal["zero", "raw"]
MismatchLevel = Literal["token", "sequence", "sequence_mean"]
MismatchForm = Literal["truncate", "mask"]


_STRICT = {"extra": "forbid", "allow_inf_nan": False}  # for pydantic, where a record is part of a configuration


@dataclass(frozen=True, kw_only=True)
class KlLimits:
    """Where estimators are cut, None nowhere. log_ratio: |log pi - log pi_ref| inside k3; k1, k2, k3: the estimate."""

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT
    log_ratio: float | None = 20.0
    k1: float | None = None
    k2: float | None = None
    k3: float | None = None


@dataclass(frozen=True, kw_only=True)
class WhiteningRule:
    """variance: with Bessel's correction or not. eps_rule: eps is added under the root, or is the least variance."""

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT
    variance: Variance = "unbiased"
    eps: float = 1e-8
    eps_rule: EpsRule = "add"


@dataclass(frozen=True, kw_only=True)
class MismatchRule:
    """Importance weights for what generator and trainer disagree on: stages/rl/mismatch.py."""

    level: MismatchLevel
    form: MismatchForm
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """What both methods choose; the fields' meaning: stages/rl/kl.py, losses.py, aggregation.py, rewards.py.

    kl_coef: 0 is off. log_ratio_limit: where the log-ratio of the policy loss is cut. reward_clip: of the reward, less
    the group's baseline where there is one.
    """

    kl_coef: float
    kl_estimator: KlEstimator
    kl_placement: KlPlacement
    kl_limits: KlLimits
    reward_clip: float | None
    clip_low: float
    clip_high: float
    dual_clip: float | None
    log_ratio_limit: float | None
    aggregation: Aggregation
    mismatch: MismatchRule | None


@dataclass(frozen=True, kw_only=True)
class PpoConvention(_Choices):
    """whitening_scope: what is whitened at once."""

    discount: float
    gae_lambda: float
    gaps: Gaps
    reward_placement: RewardPlacement
    whiten_advantages: bool
    whitening_scope: Scope
    whitening: WhiteningRule
    value_clip: float | None


@dataclass(frozen=True, kw_only=True)
class GrpoConvention(_Choices):
    """cumulate_kl: a KL in the reward is summed backwards from the end, token by token, after the baseline.

    std_eps is added to the group's standard deviation. singleton: what a group of one gets.
    """

    scale_by_std: bool
    std_eps: float
    singleton: Singleton
    cumulate_kl: bool


PPO: dict[ConventionName, PpoConvention] = {
    "openrlhf": PpoConvention(
        kl_coef=0.01,
        kl_estimator="k1",
        kl_placement="reward",
        kl_limits=KlLimits(k1=10.0, k2=10.0, k3=10.0),
        reward_clip=10.0,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        log_ratio_limit=20.0,
        aggregation="token_mean",
        mismatch=None,
        discount=1.0,
        gae_lambda=1.0,
        gaps="zero",
        reward_placement="last_token",
        whiten_advantages=True,
        whitening_scope="round",
        whitening=WhiteningRule(variance="biased", eps=1e-8, eps_rule="maximum"),
        value_clip=0.5,
    ),
    "verl": PpoConvention(
        kl_coef=0.0,
        kl_estimator="k1",
        kl_placement="reward",
        kl_limits=KlLimits(k3=10.0),
        reward_clip=None,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
        log_ratio_limit=20.0,
        aggregation="token_mean",
        mismatch=None,
        discount=1.0,
        gae_lambda=1.0,
        gaps="skip",
        reward_placement="last_token",
        whiten_advantages=True,
        whitening_scope="round",
        whitening=WhiteningRule(variance="unbiased", eps=1e-8, eps_rule="add"),
        value_clip=0.5,
    ),
    "trl": PpoConvention(
        kl_coef=0.05,
        kl_estimator="k1",
        kl_placement="reward",
        kl_limits=KlLimits(log_ratio=None),
        reward_clip=None,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        log_ratio_limit=None,
        aggregation="token_mean",
        mismatch=None,
        discount=1.0,
        gae_lambda=0.95,
        gaps="zero",
        reward_placement="first_pad",
        whiten_advantages=True,
        whitening_scope="rank",
        whitening=WhiteningRule(variance="unbiased", eps=1e-8, eps_rule="add"),
        value_clip=0.2,
    ),
    "ratchet": PpoConvention(
        kl_coef=0.05,
        kl_estimator="k1",
        kl_placement="reward",
        kl_limits=KlLimits(),
        reward_clip=None,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        log_ratio_limit=20.0,
        aggregation="token_mean",
        mismatch=None,
        discount=1.0,
        gae_lambda=0.95,
        gaps="skip",
        reward_placement="last_token",
        whiten_advantages=True,
        whitening_scope="round",
        whitening=WhiteningRule(variance="unbiased", eps=1e-8, eps_rule="add"),
        value_clip=0.2,
    ),
}
"""Each project's PPO by its own defaults. verl's KL is off; 0.001 is its coefficient where one turns it on."""

GRPO: dict[ConventionName, GrpoConvention] = {
    "openrlhf": GrpoConvention(
        kl_coef=0.01,
        kl_estimator="k1",
        kl_placement="reward",
        kl_limits=KlLimits(k1=10.0, k2=10.0, k3=10.0),
        reward_clip=10.0,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        log_ratio_limit=20.0,
        aggregation="token_mean",
        mismatch=None,
        scale_by_std=True,
        std_eps=1e-9,
        singleton="zero",
        cumulate_kl=True,
    ),
    "verl": GrpoConvention(
        kl_coef=0.0,
        kl_estimator="k3",
        kl_placement="loss",
        kl_limits=KlLimits(k3=10.0),
        reward_clip=None,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
        log_ratio_limit=20.0,
        aggregation="token_mean",
        mismatch=None,
        scale_by_std=True,
        std_eps=1e-6,
        singleton="raw",
        cumulate_kl=False,
    ),
    "trl": GrpoConvention(
        kl_coef=0.0,
        kl_estimator="k3",
        kl_placement="loss",
        kl_limits=KlLimits(log_ratio=None),
        reward_clip=None,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        log_ratio_limit=None,
        aggregation="token_mean",
        mismatch=MismatchRule(level="sequence", form="mask", low=0.0, high=3.0),
        scale_by_std=True,
        std_eps=1e-4,
        singleton="zero",
        cumulate_kl=False,
    ),
    "ratchet": GrpoConvention(
        kl_coef=0.0,
        kl_estimator="k3",
        kl_placement="loss",
        kl_limits=KlLimits(),
        reward_clip=None,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        log_ratio_limit=20.0,
        aggregation="token_mean",
        mismatch=None,
        scale_by_std=False,
        std_eps=1e-6,
        singleton="zero",
        cumulate_kl=False,
    ),
}
"""Each project's group method by its own defaults: OpenRLHF's group_norm, verl's grpo, TRL's GRPOTrainer."""
