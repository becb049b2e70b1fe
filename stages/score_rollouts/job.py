"""Contract of score_rollouts: rollouts and reward sources -> rewards, per source and in total."""

from __future__ import annotations

from typing import ClassVar, Literal

from configs.base import Frozen
from configs.rewards import SETTINGS_OF_ASKING, HttpSource, RewardSource
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """rollouts: generate_rollouts. reward_model: train_reward_model, where a source needs it."""

    rollouts: ArtifactRef
    reward_model: ArtifactRef | None = None


class Parameters(Frozen):
    """sources: what to score by. code: digest of each user function's module, by source name, comments and
    docstrings left out, so that an edited rule is a new recipe and an edited comment is not.
    """

    sources: tuple[RewardSource, ...]
    code: dict[str, str]
    dtype: Literal["float32", "bfloat16"]
    max_tokens_per_microbatch: int


class ScoreRollouts(Job):
    """Writes rewards-NNNNN.arrow, per file of rollouts: a row per rollout and source, and one named `total`."""

    STAGE: ClassVar[str] = "score_rollouts"
    VERSION: ClassVar[int] = 4
    EXCLUDED: ClassVar[frozenset[str]] = frozenset(f"parameters.sources.*.{name}" for name in SETTINGS_OF_ASKING)
    inputs: Inputs
    parameters: Parameters

    @property
    def promises_bits(self) -> bool:
        """Not where somebody else's server scores: what it says is kept, not asked for again."""
        return super().promises_bits and not any(isinstance(s, HttpSource) for s in self.parameters.sources)
