"""Contract of evaluate_policy: greedy rollouts of held-out prompts and their rewards -> figures and samples."""

from __future__ import annotations

from typing import ClassVar

from configs.base import Frozen
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """rollouts: generate_rollouts with purpose evaluation. rewards: score_rollouts of them."""

    rollouts: ArtifactRef
    rewards: ArtifactRef


class Parameters(Frozen):
    """samples: how many completions to show."""

    samples: int


class EvaluatePolicy(Job):
    """Writes evaluation.json: mean and 95 % interval per source, completion lengths, samples."""

    STAGE: ClassVar[str] = "evaluate_policy"
    VERSION: ClassVar[int] = 1
    inputs: Inputs
    parameters: Parameters
