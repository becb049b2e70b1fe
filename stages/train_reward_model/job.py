"""Contract of train_reward_model: preference pairs and the policy's body -> a scalar reward model."""

from __future__ import annotations

from typing import ClassVar

from configs.base import Frozen
from configs.models import ModelConfig, RewardModelConfig
from configs.resources import TrainerResources
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """pairs: prepare_datasets or label_preferences. policy: train_sft, whose body the reward model starts from."""

    pairs: ArtifactRef
    policy: ArtifactRef


class Parameters(Frozen):
    """model: for dtype and checkpointing."""

    model: ModelConfig
    reward_model: RewardModelConfig
    trainer: TrainerResources


class TrainRewardModel(Job):
    """Writes reward_model/ (safetensors, config, tokenizer), reward_model.json, metrics-00000.arrow.

    reward_model.json: score mean and std on the training pairs, held-out accuracy with a 95 % Wilson
    interval, mean margin, calibration error, head_sha256.
    """

    STAGE: ClassVar[str] = "train_reward_model"
    VERSION: ClassVar[int] = 3
    EXCLUDED: ClassVar[frozenset[str]] = frozenset(
        {"parameters.trainer.gpus", "parameters.reward_model.snapshot_every"}
    )
    inputs: Inputs
    parameters: Parameters
