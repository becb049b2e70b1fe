"""Contract of update_policy: rollouts and advantages -> policy_{k+1}; the trainer now stands at state_{k+1}."""

from __future__ import annotations

from typing import ClassVar

from configs.algorithms import Algorithm
from configs.base import Frozen
from configs.models import ModelConfig
from configs.resources import TrainerResources
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class TrainerState(Frozen):
    """Where the trainer stands: after an update, or fresh from policy_0 (and critic_0).

    policy: train_sft or update_policy. critic: initialize_critic, or the same update_policy; None without one.
    After an update it is a name, not a file: snapshots and redo (stages.recovery) give the state back.
    """

    policy: ArtifactRef
    critic: ArtifactRef | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether no update has been made yet."""
        return self.policy.stage != "update_policy"


class UpdateSettings(Frozen):
    """Everything that a resident trainer is built from."""

    model: ModelConfig
    algorithm: Algorithm
    trainer: TrainerResources


class Inputs(Frozen):
    """The round's files and the trainer's state before it."""

    rollouts: ArtifactRef
    logprobs: ArtifactRef
    advantages: ArtifactRef
    state: TrainerState


class Parameters(Frozen):
    """round_index: part of the seed of the minibatch order."""

    round_index: int
    temperature: float
    settings: UpdateSettings


class UpdatePolicy(Job):
    """Writes policy/, trainer.json (counters, adaptive KL coefficient), metrics-00000.arrow.

    What the critic starts from is no part of the recipe: the state names the critic that was made of it.
    """

    STAGE: ClassVar[str] = "update_policy"
    VERSION: ClassVar[int] = 5
    EXCLUDED: ClassVar[frozenset[str]] = frozenset(
        {"parameters.settings.trainer.gpus", "parameters.settings.algorithm.critic.initialize_from"}
    )
    inputs: Inputs
    parameters: Parameters
