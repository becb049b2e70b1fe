"""DeepSpeed: the only file that names it. One model, its optimizer, and its state on disk."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from configs.models import Optimizer
from configs.resources import TrainerResources
from stages.artifacts.errors import GateError

Batch = TypeVar("Batch")
_TAG = "state"


def join_ranks(device: torch.device) -> None:
    """Join the process group of this pool through a file, so that no port is opened."""
    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{os.environ['RATCHET_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def learning_rate(optimizer: Optimizer, *, step: int, num_steps: int | None) -> float:
    """The rate of optimizer step `step` (from 0): a pure function, so that no scheduler state can be lost.

    num_steps: length of the schedule; None (open-ended) allows only `constant`.
    """
    warm = min(1.0, (step + 1) / (optimizer.warmup_steps + 1))
    if optimizer.schedule == "constant" or num_steps is None:
        return optimizer.learning_rate * warm
    span = max(1, num_steps - optimizer.warmup_steps)
    done = min(1.0, max(0, step - optimizer.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if optimizer.schedule == "cosine" else 1 - done
    return optimizer.learning_rate * warm * (optimizer.final_fraction + (1 - optimizer.final_fraction) * shape)


class TrainingEngine:
    """A module under DeepSpeed.

    Gradients are those of the *sum* of the losses given to step(): the caller normalises over the whole
    optimizer step, so the result does not depend on how rows were cut into microbatches or dealt to ranks.
    """

    def __init__(
        self, module: nn.Module, *, optimizer: Optimizer, resources: TrainerResources, dtype: str, device: torch.device
    ) -> None:
        join_ranks(device)
        self.device = device
        self.optimizer = optimizer
        self.zero_stage = resources.zero_stage
        self.world_size = dist.get_world_size()
        self._engine: Any = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=_settings(optimizer, resources, dtype, bucket=_bucket(module)),
            dist_init_required=False,
        )[0]

    @property
    def module(self) -> nn.Module:
        """The module as it was given, its parameters now DeepSpeed's."""
        module: nn.Module = self._engine.module
        return module

    def __call__(self, *inputs: Any) -> Any:
        """Forward pass."""
        return self._engine(*inputs)

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        self._engine.train(mode)

    def step(self, batches: Sequence[Batch], loss_of: Callable[[Batch], torch.Tensor], *, rate: float) -> float:
        """One optimizer step over `batches`; loss_of(batch) is that batch's share of the total loss.

        Every rank must pass the same number of batches. Returns the gradient norm before clipping. Raises
        GateError before the step if a loss is not finite, after it (nothing is committed yet) if the norm is not.
        """
        self.train(True)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        for index, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(is_boundary=index == len(batches) - 1)
            loss = loss_of(batch)
            if not torch.isfinite(loss):
                raise GateError(f"loss of microbatch {index} is {loss.item()}; expected a finite number")
            self._engine.backward(loss * self.world_size)
            self._engine.step()
        norm = self._engine.get_global_grad_norm()
        value = float(norm) if norm is not None else 0.0
        if not math.isfinite(value):
            raise GateError(f"gradient norm is {value}; expected a finite number")
        return value

    def full_state(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer, whole, by the module's own names (gathered under ZeRO-3), on the CPU."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            partitioned = hasattr(tensor, "ds_id")
            with deepspeed.zero.GatheredParameters([tensor]) if partitioned else nullcontext():
                state[name] = tensor.detach().cpu().clone()
        return state

    def save(self, directory: Path) -> None:
        """Write parameters, optimizer moments and counters of this rank; returns when all ranks have."""
        self._engine.save_checkpoint(str(directory), tag=_TAG, save_latest=False)
        dist.barrier()

    def load(self, directory: Path) -> None:
        """Read what save() wrote. The caller has verified every file against a manifest of its own store."""
        path, _ = self._engine.load_checkpoint(str(directory), tag=_TAG)
        if path is None:
            raise GateError(f"{directory}: expected DeepSpeed state for {self.world_size} ranks, found none")


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Add up each value over the ranks, in float64."""
    total = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        total = total.cuda() if dist.get_backend() == "nccl" else total
        dist.all_reduce(total)
    result: list[float] = total.cpu().tolist()
    return result


def _bucket(module: nn.Module) -> int:
    """Elements reduced at once: DeepSpeed's default, but no more than the model has."""
    return min(500_000_000, sum(p.numel() for p in module.parameters()))


def _settings(optimizer: Optimizer, resources: TrainerResources, dtype: str, *, bucket: int) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": resources.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if resources.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if resources.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    adam = {
        "lr": optimizer.learning_rate,
        "betas": list(optimizer.betas),
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
    }
    if not resources.offload_optimizer:
        adam["torch_adam"] = True
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "steps_per_print": 10**9,
    }
