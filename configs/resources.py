"""Which devices do the work and how it is laid out on them. Starts nothing."""

from typing import Any, Literal

from pydantic import Field, model_validator

from configs.base import Frozen


class TrainerResources(Frozen):
    """The DeepSpeed ranks: SFT, reward model, logprobs, scoring by the reward model, updates."""

    ranks: int = Field(default=1, ge=1, le=8)
    gpus: tuple[int, ...] = Field(default=(), description="CUDA device indices, one per rank; empty on CPU")
    threads: int = Field(default=2, ge=1, description="CPU threads per rank")
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False
    max_tokens_per_microbatch: int = Field(default=16_384, ge=16, description="tokens of one forward pass")

    @model_validator(mode="after")
    def _consistent(self) -> "TrainerResources":
        if self.gpus and len(self.gpus) != self.ranks:
            raise ValueError(f"expected one GPU per rank: gpus has {len(self.gpus)} entries, ranks is {self.ranks}")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(f"offload_parameters needs zero_stage 3, found {self.zero_stage}")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3, found 0")
        return self


class GeneratorResources(Frozen):
    """The vLLM engines. Shards of a round are dealt out over them; the result does not depend on how many."""

    engines: int = Field(default=1, ge=1, le=8)
    gpus: tuple[int, ...] = Field(default=(), description="engines x tensor_parallel CUDA device indices")
    threads: int = Field(default=2, ge=1, description="CPU threads per engine")
    tensor_parallel: int = Field(default=1, ge=1, le=8)
    gpu_memory_utilization: float = Field(default=0.85, gt=0.0, le=0.98)
    kv_cache_gib: int = Field(default=1, ge=1, description="key-value cache on CPU")
    max_concurrent: int = Field(default=512, ge=1, description="sequences in flight per engine")
    eager: bool = Field(default=True, description="no CUDA graphs, no torch.compile; with gpus, false by itself")

    @model_validator(mode="before")
    @classmethod
    def _graphs_on_gpus(cls, given: Any) -> Any:
        """A short run on CPU ends before compiling has paid; without graphs a GPU waits for launches."""
        if isinstance(given, dict) and given.get("gpus") and "eager" not in given:
            return {**given, "eager": False}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "GeneratorResources":
        need = self.engines * self.tensor_parallel
        if self.gpus and len(self.gpus) != need:
            raise ValueError(f"expected engines x tensor_parallel = {need} GPUs, found {len(self.gpus)}")
        return self


class Resources(Frozen):
    """The machine's share that a run may use, and when a silent worker counts as lost."""

    trainer: TrainerResources = TrainerResources()
    generator: GeneratorResources = GeneratorResources()
    take_turns: bool = Field(
        default=False,
        description="trainer and generator share their GPUs: whichever is not at work gives its memory back",
    )
    stall_seconds: float = Field(default=600.0, gt=0.0, description="without progress, a worker is replaced")
    attempts: int = Field(default=3, ge=1, le=10, description="tries of one stage before the run stops")

    @model_validator(mode="after")
    def _consistent(self) -> "Resources":
        trainer = self.trainer
        shared = sorted(set(trainer.gpus) & set(self.generator.gpus))
        if shared and not self.take_turns:
            raise ValueError(
                f"GPUs {shared} are given to both trainer and generator; expected separate devices, or take_turns: true"
            )
        if self.take_turns and (trainer.zero_stage == 0 or trainer.offload_optimizer or trainer.offload_parameters):
            raise ValueError(
                "take_turns needs trainer.zero_stage 1, 2 or 3, offload_optimizer: false and offload_parameters: false "
                f"(the trainer moves all of its state by itself), found {trainer.zero_stage}, "
                f"{trainer.offload_optimizer} and {trainer.offload_parameters}"
            )
        return self
