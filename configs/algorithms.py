"""How the policy is optimised: PPO or GRPO. Numbers and names only; the equations are in stages/rl."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from configs.base import Frozen
from configs.models import Optimizer

KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token_mean", "sequence_mean"]


def _constant(optimizer: Optimizer) -> Optimizer:
    """The rounds are open-ended: a run can be given more of them, so no schedule can know its end."""
    if optimizer.schedule != "constant":
        raise ValueError(f"schedule: expected constant (after warmup_steps) in the rounds, found {optimizer.schedule}")
    return optimizer


RoundOptimizer = Annotated[Optimizer, AfterValidator(_constant)]


class _Shared(Frozen):
    """What both algorithms have."""

    policy_optimizer: RoundOptimizer = Optimizer(learning_rate=2e-5)
    epochs: int = Field(default=1, ge=1, description="passes over a round's rollouts")
    num_minibatches: int = Field(default=2, ge=1, description="optimizer steps per epoch")
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(default=0.2, gt=0.0)
    aggregation: Aggregation = "token_mean"
    entropy_coef: float = Field(default=0.0, ge=0.0)
    kl_target: float | None = Field(default=None, gt=0.0, description="sets the adaptive controller's target")
    kl_horizon: float = Field(default=10_000.0, gt=0.0, description="in rollouts")
    max_kl_to_old: float | None = Field(
        default=None, gt=0.0, description="nats per token from the round's start; a step beyond it stops the run"
    )


class Ppo(_Shared):
    """PPO: GAE, a learned critic that starts from the reward model, KL to the reference in the reward."""

    name: Literal["ppo"] = "ppo"
    kl_coef: float = Field(default=0.05, ge=0.0)
    kl_estimator: KlEstimator = "k1"
    kl_placement: Literal["reward", "loss"] = "reward"
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    whiten_advantages: bool = True
    value_clip: float = Field(default=0.2, gt=0.0)
    critic_optimizer: RoundOptimizer = Optimizer(learning_rate=3e-4)


class Grpo(_Shared):
    """GRPO: the group's mean reward is the baseline; no critic."""

    name: Literal["grpo"] = "grpo"
    clip_high: float = Field(default=0.28, gt=0.0)
    kl_coef: float = Field(default=0.0, ge=0.0)
    kl_estimator: KlEstimator = "k3"
    kl_placement: Literal["reward", "loss"] = "loss"
    scale_by_std: bool = Field(default=False, description="divide by the group's standard deviation")


Algorithm = Annotated[Ppo | Grpo, Field(discriminator="name")]
