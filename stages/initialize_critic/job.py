"""Contract of initialize_critic: the reward model's body and head -> critic_0."""

from __future__ import annotations

from typing import ClassVar

from configs.base import Frozen
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """reward_model: train_reward_model."""

    reward_model: ArtifactRef


class Parameters(Frozen):
    """Nothing to choose yet."""


class InitializeCritic(Job):
    """Writes critic/ (safetensors, config, tokenizer). Gate: its head equals the reward model's, by hash."""

    STAGE: ClassVar[str] = "initialize_critic"
    VERSION: ClassVar[int] = 1
    inputs: Inputs
    parameters: Parameters = Parameters()
