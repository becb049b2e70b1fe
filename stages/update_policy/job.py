"""Contract of update_policy: rollouts and advantages -> policy_{k+1}, critic_{k+1}, trainer state_{k+1}."""

from __future__ import annotations

from typing import ClassVar

from configs.algorithms import Algorithm
from configs.base import Frozen
from configs.models import ModelConfig
from configs.resources import TrainerResources
from stages.artifacts.store import ArtifactRef
from stages.job import Job


class TrainerState(Frozen):
    """Where the trainer stands: after an update, or fresh from policy_0 (and critic_0).

    policy: train_sft or update_policy. critic: initialize_critic, or the same update_policy; None without one.
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
    """Writes policy/, critic/ (with a critic), trainer/ (DeepSpeed state), trainer.json, metrics-00000.arrow."""

    STAGE: ClassVar[str] = "update_policy"
    VERSION: ClassVar[int] = 1
    EXCLUDED: ClassVar[frozenset[str]] = frozenset({"parameters.settings.trainer.gpus"})
    inputs: Inputs
    parameters: Parameters
