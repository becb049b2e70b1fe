"""Contract of train_sft: demonstrations and a base model -> policy_0, which is also the reference policy."""

from __future__ import annotations

from typing import ClassVar

from configs.base import Frozen
from configs.models import ModelConfig, SftConfig
from configs.resources import TrainerResources
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """data: prepare_datasets."""

    data: ArtifactRef


class Parameters(Frozen):
    """sft: None copies the base model as it is. base_digest: of a pretrained model's files; empty from scratch."""

    model: ModelConfig
    sft: SftConfig | None
    trainer: TrainerResources
    base_digest: str = ""


class TrainSft(Job):
    """Writes policy/ (safetensors, config, tokenizer) and metrics-00000.arrow."""

    STAGE: ClassVar[str] = "train_sft"
    VERSION: ClassVar[int] = 3
    EXCLUDED: ClassVar[frozenset[str]] = frozenset({"parameters.trainer.gpus", "parameters.sft.snapshot_every"})
    inputs: Inputs
    parameters: Parameters
