"""Contract of label_preferences: judged rollouts of the SFT policy -> preference pairs."""

from __future__ import annotations

from typing import ClassVar

from configs.base import Frozen
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """rollouts and their rewards by the judge, for training and held-out prompts."""

    rollouts_train: ArtifactRef
    rewards_train: ArtifactRef
    rollouts_held_out: ArtifactRef
    rewards_held_out: ArtifactRef


class Parameters(Frozen):
    """pairs_per_prompt: at most; completions of equal reward or equal text make no pair."""

    pairs_per_prompt: int


class LabelPreferences(Job):
    """Writes pairs_train-00000.arrow and pairs_held_out-00000.arrow."""

    STAGE: ClassVar[str] = "label_preferences"
    VERSION: ClassVar[int] = 1
    inputs: Inputs
    parameters: Parameters
