"""The resident trainer: policy and critic under DeepSpeed, kept between jobs under the fingerprint of their state.

compute_logprobs and update_policy both work on it. A cold one built from artifacts gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from configs.algorithms import Ppo
from configs.models import ModelConfig
from stages.artifacts.durable import read_json, write_json
from stages.artifacts.seeds import seed_at
from stages.artifacts.store import open_artifact
from stages.engines.deepspeed_engine import TrainingEngine
from stages.engines.devices import open_device
from stages.job import Job
from stages.models.adapters import add_adapters, merged_state
from stages.models.batches import Microbatch, TokenBatch, microbatches
from stages.models.language import TokenLogprobs, export_policy, load_policy, write_model
from stages.models.scalar import TokenScores, load_scalar_model
from stages.program import Context
from stages.update_policy.job import TrainerState, UpdateSettings

Rows = Sequence[dict[str, Any]]
_LIVE = "trainer"


class Trainer:
    """Policy and, for PPO, critic, with their optimizers and the counters that belong to them.

    optimizer_steps: made so far in this run. kl_coef: the adaptive controller's value.
    """

    def __init__(self, job: Job, settings: UpdateSettings, state: TrainerState) -> None:
        model, resources = settings.model, settings.trainer
        self.settings = settings
        self.device = open_device(job.compute)
        self.optimizer_steps = 0
        self.kl_coef = settings.algorithm.kl_coef
        torch.manual_seed(seed_at(job.seed, "adapters"))
        directory = open_artifact(job.store, state.policy)
        self.tokenizer = directory / "policy"
        self._language = load_policy(directory / "policy", dtype=model.dtype)
        _prepare(self._language, model)
        self.policy = TrainingEngine(
            TokenLogprobs(self._language, entropy_gradient=settings.algorithm.entropy_coef > 0),
            optimizer=settings.algorithm.policy_optimizer,
            resources=resources,
            dtype=model.dtype,
            device=self.device,
        )
        self.critic: TrainingEngine | None = None
        if isinstance(settings.algorithm, Ppo):
            assert state.critic is not None, "ppo has a critic"
            self._scalar = load_scalar_model(open_artifact(job.store, state.critic) / "critic", dtype=model.dtype)
            if model.gradient_checkpointing:
                self._scalar.gradient_checkpointing_enable({"use_reentrant": False})
            self.critic = TrainingEngine(
                TokenScores(self._scalar),
                optimizer=settings.algorithm.critic_optimizer,
                resources=resources,
                dtype=model.dtype,
                device=self.device,
            )
        if not state.is_fresh:
            self._resume(directory)

    def _resume(self, directory: Path) -> None:
        self.policy.load(directory / "trainer" / "policy")
        if self.critic is not None:
            self.critic.load(directory / "trainer" / "critic")
        counters = read_json(directory / "trainer.json")
        self.optimizer_steps = counters["optimizer_steps"]
        self.kl_coef = counters["kl_coef"]

    def save(self, out: Path, *, rank: int) -> None:
        """Write policy/, critic/ and trainer/ under `out`. Every rank must call it."""
        self.policy.save(out / "trainer" / "policy")
        if self.critic is not None:
            self.critic.save(out / "trainer" / "critic")
            scalar = _own_names(self.critic.full_state())
            if rank == 0:
                write_model(scalar, like=self._scalar, tokenizer=self.tokenizer, directory=out / "critic")
        state = _own_names(self.policy.full_state())
        if rank == 0:
            merged = merged_state(self._language, state)
            export_policy(merged, like=self._language, tokenizer=self.tokenizer, directory=out / "policy")
            counters = {"optimizer_steps": self.optimizer_steps, "kl_coef": self.kl_coef}
            write_json(out / "trainer.json", counters)

    def split(self, rows: Rows, context: Context) -> list[Microbatch]:
        """This rank's microbatches of `rows` (with prompt_ids and completion_ids), balanced by tokens."""
        lengths = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]
        limit = self.settings.trainer.max_tokens_per_microbatch
        return microbatches(lengths, max_tokens=limit, world_size=context.world_size)[context.rank]

    def batch(self, rows: Rows, microbatch: Microbatch) -> TokenBatch:
        """The padded tensors of one microbatch."""
        picked = [rows[index] for index in microbatch.rows]
        return TokenBatch.of(
            [row["prompt_ids"] for row in picked], [row["completion_ids"] for row in picked], device=self.device
        )

    def values(self, batch: TokenBatch) -> torch.Tensor:
        """Critic outputs before each completion token: values_N."""
        assert self.critic is not None, "only ppo has a critic"
        scores_BL: torch.Tensor = self.critic(batch.input_ids_BL)
        return scores_BL[batch.select_BL]


def resident_trainer(job: Job, settings: UpdateSettings, state: TrainerState, context: Context) -> Trainer:
    """The live trainer if it stands at `state`, else a new one built from the artifacts of `state`."""
    key = f"{state.policy}|{state.critic}|{settings.model_dump_json()}"
    held = context.live.get(_LIVE)
    if held is not None and held[0] == key:
        trainer: Trainer = held[1]
        return trainer
    context.live.pop(_LIVE, None)
    context.progress("loading trainer", 0, 1)
    trainer = Trainer(job, settings, state)
    context.live[_LIVE] = (key, trainer)
    return trainer


def advance_resident_trainer(job: Job, settings: UpdateSettings, trainer: Trainer, context: Context) -> None:
    """Say that the live trainer now stands at the state that `job` makes."""
    critic = job.ref if trainer.critic is not None else None
    state = TrainerState(policy=job.ref, critic=critic)
    context.live[_LIVE] = (f"{state.policy}|{state.critic}|{settings.model_dump_json()}", trainer)


def drop_resident_trainer(context: Context) -> None:
    """Forget the live trainer: its state is in doubt."""
    context.live.pop(_LIVE, None)


def _prepare(model: PreTrainedModel, config: ModelConfig) -> None:
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.lora is not None:
        if config.gradient_checkpointing:
            model.enable_input_require_grads()
        add_adapters(model, config.lora)


def _own_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
