"""DeepSpeed: the only file that names it. One model, its optimizer, and its state on disk."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn

from configs.models import Optimizer
from configs.resources import TrainerResources
from stages.artifacts.errors import GateError, InputError

Batch = TypeVar("Batch")
_TAG = "state"
_GRADIENTS = (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)


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
        self._engine.checkpoint_engine.save = _save_by_content

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

    def step(
        self,
        batches: Sequence[Batch],
        loss_of: Callable[[Batch], torch.Tensor],
        *,
        rate: float,
        where: Callable[[Sequence[Batch]], str],
    ) -> float:
        """One optimizer step over `batches`; loss_of(batch) is that batch's share of the total loss.

        Every rank must pass the same number of batches. where: names the step and what is in the batches. Returns
        the gradient norm before clipping. Raises GateError before the step if a loss is not finite, after it
        (nothing is committed yet) if the norm is not.
        """
        if not batches:
            raise GateError("expected at least one microbatch for an optimizer step, found none")
        self.train(True)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        norm: Any = None
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            self._engine.set_gradient_accumulation_boundary(is_boundary=is_last)
            loss = loss_of(batch)
            if not torch.isfinite(loss):
                raise GateError(
                    f"{where([batch])}: loss of microbatch {index} is {loss.item()}; expected a finite number; "
                    f"{self._first_not_finite()}"
                )
            self._engine.backward(loss * self.world_size)
            if is_last and not self._engine.zero_optimization():
                # Without ZeRO DeepSpeed keeps no norm; the gradients are already summed over the ranks here.
                norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
            self._engine.step()
        value = float(self._engine.get_global_grad_norm() if norm is None else norm)
        if not math.isfinite(value):
            raise GateError(
                f"{where(batches)}: gradient norm is {value}; expected a finite number; {self._first_not_finite()}"
            )
        return value

    def _first_not_finite(self) -> str:
        """Names a parameter that holds NaN or Inf, for the message of a gate."""
        for name, parameter in self.module.named_parameters():
            if not torch.isfinite(getattr(parameter, "ds_tensor", parameter)).all():
                return f"parameter {name} is not finite"
        return "every parameter is finite"

    def full_state(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer, whole, by the module's own names (gathered under ZeRO-3), on the CPU."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            partitioned = hasattr(tensor, "ds_id")
            with deepspeed.zero.GatheredParameters([tensor]) if partitioned else nullcontext():
                state[name] = tensor.detach().cpu().clone()
        return state

    def rest(self) -> None:
        """Move parameters, gradients and optimizer moments to host memory, so that another process has the device."""
        pin_memory = self.device.type == "cuda"
        if self.zero_stage < 3:
            self._engine.offload_states(pin_memory=pin_memory)
            return
        whole = not self._frozen()
        self._engine.offload_states(
            include=(*_GRADIENTS, OffloadStateTypeEnum.lp_params) if whole else _GRADIENTS, pin_memory=pin_memory
        )
        self._move_what_deepspeed_leaves(torch.device("cpu"))

    def resume(self) -> None:
        """Move them back."""
        self._engine.reload_states()
        if self.zero_stage == 3:
            self._move_what_deepspeed_leaves(self.device)

    def _frozen(self) -> list[Any]:
        return [p for p in self._engine.module.parameters() if not p.requires_grad]

    def _move_what_deepspeed_leaves(self, device: torch.device) -> None:
        """ZeRO 3's float32 parameters and moments, which it moves for its own Adam alone, and frozen parameters, which
        it takes for trained ones; beside those, trained ones are few and stay.
        """
        zero = self._engine.optimizer
        for tensor in (*zero.fp32_partitioned_groups_flat, *(p.ds_tensor for p in self._frozen())):
            tensor.data = tensor.data.to(device)
        for state in zero.optimizer.state.values():
            state.update({name: x.to(device) for name, x in state.items() if torch.is_tensor(x) and x.numel() > 1})

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def save(self, directory: Path) -> None:
        """Write parameters, optimizer moments and counters of this rank; returns when all ranks have."""
        self._engine.save_checkpoint(str(directory), tag=_TAG, save_latest=False)
        dist.barrier()

    def load(self, directory: Path) -> None:
        """Read what save() wrote, also with another number of ranks (the same numbers, summed in another order since).

        The caller has verified every file against a manifest of its own store. Raises InputError where another number
        of ranks cannot read it.
        """
        shares = sorted((directory / _TAG).glob("*_optim_states.pt"), key=_rank_of)
        same = len(shares) in (0, self.world_size)  # none without ZeRO: every rank holds all of it
        if not same and self.zero_stage == 3:
            raise InputError(
                f"resources.trainer.ranks: expected {len(shares)}, which saved {directory} with zero_stage 3, found "
                f"{self.world_size}; only stages 0 to 2 can go on with another number of ranks"
            )
        path, _ = self._engine.load_checkpoint(str(directory), tag=_TAG, load_optimizer_states=same)
        if path is None:
            raise GateError(f"{directory}: expected DeepSpeed state for {self.world_size} ranks, found none")
        if not same:
            self._deal_anew(shares)

    def _deal_anew(self, shares: Sequence[Path]) -> None:
        """Fill this rank's part of the optimizer's flat groups from the parts that other ranks saved (ZeRO 1 and 2)."""
        zero = self._engine.optimizer
        read = self._engine.checkpoint_engine.load
        states = [read(str(share), map_location="cpu")["optimizer_state_dict"] for share in shares]
        for index, master in enumerate(zero.single_partition_of_fp32_groups):
            numel = sum(p.numel() for p in zero.bit16_groups[index])

            def mine(parts: Sequence[torch.Tensor], numel: int = numel, size: int = master.numel()) -> torch.Tensor:
                whole = torch.zeros(size * self.world_size)
                whole[:numel] = torch.cat([part.flatten() for part in parts])[:numel]  # padding is at the end
                return whole[size * dist.get_rank() :][:size]

            master.data.copy_(mine([state["single_partition_of_fp32_groups"][index] for state in states]))
            live = zero.optimizer.state[zero.optimizer.param_groups[index]["params"][0]]
            saved = [state["base_optimizer_state"]["state"][index] for state in states]
            for key, value in saved[0].items():
                if torch.is_tensor(value) and value.numel() > 1:
                    live[key] = mine([one[key] for one in saved]).to(master.device)
                else:
                    live[key] = value


def _rank_of(share: Path) -> int:
    """The rank that saved `[bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt`."""
    return int(share.name.partition("pp_rank_")[2].partition("_")[0])


def _save_by_content(state_dict: dict[str, Any], path: str) -> None:
    """torch.save, whose bytes also depend on which equal strings are one object and on what is hung on tensors; here
    they depend on content alone.

    Otherwise a state that was saved, loaded and saved again would hold the same numbers in other bytes.
    """
    words: dict[str, str] = {}

    def settled(value: Any) -> Any:
        if isinstance(value, str):
            return words.setdefault(value, value)
        if isinstance(value, torch.Tensor) and vars(value):
            return value.detach()  # without what ZeRO 3 hangs on it: a number that counts the engines of this process
        if type(value) in (dict, OrderedDict):
            made = type(value)((settled(k), settled(v)) for k, v in value.items())
            if isinstance(made, OrderedDict):
                vars(made).update(settled(vars(value)))  # a state_dict keeps its _metadata there
            return made
        if type(value) in (list, tuple):
            return type(value)(settled(item) for item in value)
        return value

    torch.save(settled(state_dict), path)


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
    # Without ZeRO, DeepSpeed divides bfloat16 gradients by a loss scale that it never multiplied by; stage 1 does not.
    stage = max(resources.zero_stage, 1) if dtype == "bfloat16" else resources.zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
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
