"""How the policy is optimised: a union of methods, each a few fields with vetted defaults. Numbers and names only; the
equations are in stages/rl, and what a convention sets is in conventions.py.
"""

from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from configs.base import Frozen
from configs.conventions import (
    GRPO,
    PPO,
    Aggregation,
    ConventionName,
    KlEstimator,
    KlLimits,
    KlPlacement,
    MismatchForm,
    MismatchLevel,
    RewardPlacement,
    Scope,
    Singleton,
    WhiteningRule,
)
from configs.critic import Critic
from configs.models import Optimizer

PolicyLossName = Literal["clip", "gspo", "cispo", "reinforce"]


def _constant(optimizer: Optimizer) -> Optimizer:
    """The rounds are open-ended: a run can be given more of them, so no schedule can know its end."""
    if optimizer.schedule != "constant":
        raise ValueError(f"schedule: expected constant (after warmup_steps) in the rounds, found {optimizer.schedule}")
    return optimizer


RoundOptimizer = Annotated[Optimizer, AfterValidator(_constant)]


class Overlong(Frozen):
    """Soft overlong punishment: reward falls by up to `factor` over the last `buffer_share` of the longest completion.

    The share is that of Yu et al. 2025 (DAPO): 4,096 of 20,480 tokens.
    """

    buffer_share: float = Field(default=0.2, gt=0.0, le=1.0)
    factor: float = Field(default=1.0, gt=0.0)


class Mismatch(Frozen):
    """Importance weights for what generator and trainer disagree on; stages/rl/mismatch.py says which is whose.

    level sequence_mean can only mask. verl: token, truncate, high 2. TRL: sequence, mask, high 3. IcePop: token, mask,
    0.5 to 5.
    """

    level: MismatchLevel = "token"
    form: MismatchForm = "truncate"
    low: float = Field(default=0.0, ge=0.0)
    high: float = Field(default=2.0, ge=1.0)

    @model_validator(mode="after")
    def _possible(self) -> "Mismatch":
        if self.level == "sequence_mean" and self.form != "mask":
            raise ValueError(f"form: expected mask for level sequence_mean, found {self.form}")
        if self.low > 1.0:
            raise ValueError(f"low: expected at most 1, the weight where both agree, found {self.low}")
        return self


class _Shared(Frozen):
    """What all methods have."""

    MIN_GROUP_SIZE: ClassVar[int] = 1
    policy_optimizer: RoundOptimizer = Optimizer(learning_rate=2e-5)
    epochs: int = Field(default=1, ge=1, description="passes over a round's rollouts")
    num_minibatches: int = Field(default=2, ge=1, description="optimizer steps per epoch")
    loss: PolicyLossName = "clip"
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0, description="1 is no lower bound")
    clip_high: float = Field(default=0.2, gt=0.0)
    dual_clip: float | None = Field(default=None, gt=1.0, description="bounds the loss where the advantage is negative")
    log_ratio_limit: float | None = Field(default=20.0, gt=0.0)
    aggregation: Aggregation = "token_mean"
    entropy_coef: float = Field(default=0.0, ge=0.0)
    kl_coef: float = Field(default=0.0, ge=0.0)
    kl_estimator: KlEstimator = "k3"
    kl_placement: KlPlacement = "loss"
    kl_limits: KlLimits = KlLimits()
    kl_target: float | None = Field(default=None, gt=0.0, description="sets the adaptive controller's target")
    kl_horizon: float = Field(default=10_000.0, gt=0.0, description="in rollouts")
    max_kl_to_old: float | None = Field(
        default=None, gt=0.0, description="nats per token from the policy that sampled; a step beyond it stops the run"
    )
    reward_clip: float | None = Field(default=None, gt=0.0, description="of the reward, less the group's baseline")
    truncated: Literal["keep", "mask"] = Field(default="keep", description="whether cut completions are trained on")
    truncated_penalty: float = Field(default=0.0, ge=0.0, description="taken off the reward of a cut completion")
    overlong: Overlong | None = None
    mismatch: Mismatch | None = None
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="that of sampling, from where it is taken; overlong and constant need it"
    )


def _by_convention(tree: Any, fields: Any, conventions: Any) -> Any:
    """`tree` with the convention's numbers where it has none of its own."""
    name = tree.get("convention", "ratchet") if isinstance(tree, dict) else None
    if not isinstance(name, str) or name not in conventions:
        return tree
    return {key: value for key, value in asdict(conventions[name]).items() if key in fields} | tree


class Ppo(_Shared):
    """PPO: GAE, a learned critic that starts from the reward model or the policy, KL to the reference in the reward.

    convention: whose defaults fill in what is not set; docs/mathematics.md.
    """

    name: Literal["ppo"] = "ppo"
    convention: ConventionName = "ratchet"
    kl_coef: float = Field(default=0.05, ge=0.0)
    kl_estimator: KlEstimator = "k1"
    kl_placement: KlPlacement = "reward"
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    reward_placement: RewardPlacement = Field(
        default="last_token", description="first_pad: after the end, where the critic is read and trained as well"
    )
    whiten_advantages: bool = True
    whitening_scope: Scope = Field(
        default="round", description="rank: each trainer rank's share of the round by itself"
    )
    whitening: WhiteningRule = WhiteningRule()
    value_clip: float | None = Field(default=0.2, gt=0.0)
    critic: Critic = Critic()
    critic_optimizer: RoundOptimizer = Optimizer(learning_rate=3e-4)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, tree: Any) -> Any:
        return _by_convention(tree, cls.model_fields, PPO)


class _Group(_Shared):
    """What the methods with the group's mean reward as baseline have: no critic."""

    MIN_GROUP_SIZE: ClassVar[int] = 2
    scale_by_std: bool = Field(default=True, description="divide by the group's standard deviation")
    std_eps: float = Field(default=1e-6, ge=0.0)


class Grpo(_Group):
    """GRPO: the group's mean reward is the baseline; no critic.

    convention: whose defaults fill in what is not set; docs/mathematics.md.
    """

    name: Literal["grpo"] = "grpo"
    convention: ConventionName = "ratchet"
    clip_high: float = Field(default=0.28, gt=0.0)
    scale_by_std: bool = Field(default=False, description="divide by the group's standard deviation")
    singleton: Singleton = "zero"
    cumulate_kl: bool = Field(default=False, description="a KL in the reward is summed backwards, token by token")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, tree: Any) -> Any:
        return _by_convention(tree, cls.model_fields, GRPO)


class DrGrpo(_Group):
    """Dr. GRPO (Liu et al. 2025): neither the standard deviation nor a completion's length scales anything."""

    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "constant"
    scale_by_std: bool = False


class Dapo(_Group):
    """DAPO's loss and shaping (Yu et al. 2025): clip-higher, token mean, no KL, soft overlong punishment."""

    name: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, gt=0.0)
    overlong: Overlong | None = Overlong()


class Gspo(_Group):
    """GSPO (Zheng et al. 2025): ratio and clip of the whole completion; the clips are the paper's."""

    name: Literal["gspo"] = "gspo"
    loss: PolicyLossName = "gspo"
    clip_low: float = Field(default=3e-4, gt=0.0, le=1.0)
    clip_high: float = Field(default=4e-4, gt=0.0)
    aggregation: Aggregation = "sequence_mean"


class Cispo(_Group):
    """CISPO (MiniMax 2025): the importance weight is cut at 1 + clip_high, as TRL does at 5; no token's gradient is."""

    name: Literal["cispo"] = "cispo"
    loss: PolicyLossName = "cispo"
    clip_low: float = Field(default=1.0, gt=0.0, le=1.0, description="1 is no lower bound")
    clip_high: float = Field(default=4.0, gt=0.0)


class Rloo(_Shared):
    """RLOO (Ahmadian et al. 2024): the mean of the group's other rewards is the baseline; KL in the reward."""

    MIN_GROUP_SIZE: ClassVar[int] = 2
    name: Literal["rloo"] = "rloo"
    kl_coef: float = Field(default=0.05, ge=0.0)
    kl_estimator: KlEstimator = "k1"
    kl_placement: KlPlacement = "reward"


class ReinforcePp(_Shared):
    """REINFORCE++ (Hu et al. 2025): returns, KL included, whitened over the round; no critic and no group."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    kl_coef: float = Field(default=0.01, ge=0.0)
    kl_estimator: KlEstimator = "k1"
    kl_placement: KlPlacement = "reward"
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    whitening: WhiteningRule = WhiteningRule()


class ReinforcePpBaseline(_Shared):
    """REINFORCE++-baseline: the group's mean is the baseline, the round's deviation the scale; KL k2 in the loss."""

    MIN_GROUP_SIZE: ClassVar[int] = 2
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl_estimator: KlEstimator = "k2"
    kl_placement: Literal["loss"] = "loss"
    whitening: WhiteningRule = WhiteningRule()


Algorithm = Annotated[
    Ppo | Grpo | DrGrpo | Dapo | Gspo | Cispo | Rloo | ReinforcePp | ReinforcePpBaseline, Field(discriminator="name")
]
