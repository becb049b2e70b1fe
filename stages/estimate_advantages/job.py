"""Contract of estimate_advantages: rewards and logprobs -> credit per completion token. Pure; seconds."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from configs.algorithms import Algorithm
from configs.base import Frozen
from stages.artifacts.reference import ArtifactRef
from stages.job import Job
from stages.update_policy.job import TrainerState


class Inputs(Frozen):
    """rollouts, rewards, logprobs: of this round. state: holds the adaptive KL coefficient."""

    rollouts: ArtifactRef
    rewards: ArtifactRef
    logprobs: ArtifactRef
    state: TrainerState


class Parameters(Frozen):
    """algorithm: which estimator, and its numbers. ranks: the shares of the round, where each is whitened by itself."""

    algorithm: Algorithm
    ranks: int = Field(default=1, ge=1)


class EstimateAdvantages(Job):
    """Writes advantages-00000.arrow."""

    STAGE: ClassVar[str] = "estimate_advantages"
    VERSION: ClassVar[int] = 2
    EXCLUDED: ClassVar[frozenset[str]] = frozenset({"parameters.algorithm.critic.initialize_from"})
    inputs: Inputs
    parameters: Parameters
