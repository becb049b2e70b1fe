"""Contract of generate_rollouts: prompts and a policy -> rollout shards."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from configs.base import Frozen
from configs.resources import GeneratorResources
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """data: prepare_datasets. policy: train_sft or update_policy (both hold policy/)."""

    data: ArtifactRef
    policy: ArtifactRef


class Parameters(Frozen):
    """Which prompts, how many completions of each, and how they are sampled.

    split: part of the data, in an order shuffled anew each epoch from the run's seed. num_prompts, window: the
    window-th batch of that many; an epoch's remainder is skipped, so that no prompt comes twice in a batch. batch:
    0, or the how-manieth refill of the window, of prompts that it has not had.
    purpose: part of the sampling seeds. temperature 0 is greedy. finish_fraction: below 1, a shard does not wait for
    its longest completions: stages/engines/vllm_engine.py says how they are cut.
    """

    purpose: Literal["training", "preferences", "evaluation"]
    round_index: int
    split: Literal["train", "held_out"]
    window: int = Field(ge=0)
    batch: int = Field(default=0, ge=0)
    num_prompts: int = Field(ge=1)
    group_size: int = Field(ge=1)
    prompts_per_shard: int = Field(ge=1)
    temperature: float = Field(ge=0.0)
    max_completion_tokens: int = Field(ge=1)
    finish_fraction: float = Field(gt=0.0, le=1.0)
    max_prompt_tokens: int = Field(ge=1)
    dtype: Literal["float32", "bfloat16"]
    generator: GeneratorResources


class GenerateRollouts(Job):
    """Writes rollouts-NNNNN.arrow, one per `prompts_per_shard` prompts, each durable as soon as it is whole."""

    STAGE: ClassVar[str] = "generate_rollouts"
    VERSION: ClassVar[int] = 2
    WORKER: ClassVar[Literal["trainer", "generator"]] = "generator"
    EXCLUDED: ClassVar[frozenset[str]] = frozenset(
        {
            "compute.ranks",
            "parameters.generator.engines",
            "parameters.generator.gpus",
            "parameters.generator.gpu_memory_utilization",
            "parameters.generator.kv_cache_gib",
        }
    )
    inputs: Inputs
    parameters: Parameters
