"""Contract of initialize_critic: a reward model, the policy or a model directory -> critic_0."""

from __future__ import annotations

from typing import ClassVar, Literal

from configs.base import Frozen
from configs.critic import CriticStart
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """What `start` needs, and nothing else. reward_model: train_reward_model, for its body and head. policy:
    train_sft, for its body and tokenizer.
    """

    reward_model: ArtifactRef | None = None
    policy: ArtifactRef | None = None


class Parameters(Frozen):
    """dtype: the critic's. start_digest: of the content of a user's directory, whose path does not count."""

    start: CriticStart
    dtype: Literal["float32", "bfloat16"]
    start_digest: str = ""


class InitializeCritic(Job):
    """Writes critic/ (safetensors, config, tokenizer).

    Gate: its body, and its head where that is kept, are the source's by hash.
    """

    STAGE: ClassVar[str] = "initialize_critic"
    VERSION: ClassVar[int] = 2
    EXCLUDED: ClassVar[frozenset[str]] = frozenset({"parameters.start.path"})
    inputs: Inputs
    parameters: Parameters
