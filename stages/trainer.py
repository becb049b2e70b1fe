"""The trainer: policy and critic under DeepSpeed with their optimizers. Knows not how a lost one is brought back."""

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
from stages.models.batches import Microbatch, TokenBatch, rollout_cost
from stages.models.language import TokenLogprobs, export_policy, load_policy, write_model
from stages.models.scalar import TokenScores, load_scalar_model
from stages.models.work import deal
from stages.program import Context
from stages.update_policy.job import TrainerState, UpdateSettings

Rows = Sequence[dict[str, Any]]


class Trainer:
    """Policy and, for PPO, critic, with their optimizers and the counters that belong to them.

    origin: the fresh state that the rounds began with. optimizer_steps: made so far in this run. kl_coef: the
    adaptive controller's value.
    """

    def __init__(self, job: Job, settings: UpdateSettings, origin: TrainerState) -> None:
        assert origin.is_fresh, "a trainer begins where the rounds began"
        model, resources = settings.model, settings.trainer
        self.settings = settings
        self.device = open_device(job.compute)
        self.optimizer_steps = 0
        self.kl_coef = settings.algorithm.kl_coef
        torch.manual_seed(seed_at(job.seed, "adapters"))
        directory = open_artifact(job.store, origin.policy)
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
            assert origin.critic is not None, "ppo has a critic"
            self._scalar = load_scalar_model(open_artifact(job.store, origin.critic) / "critic", dtype=model.dtype)
            if model.gradient_checkpointing:
                self._scalar.gradient_checkpointing_enable({"use_reentrant": False})
            self.critic = TrainingEngine(
                TokenScores(self._scalar),
                optimizer=settings.algorithm.critic_optimizer,
                resources=resources,
                dtype=model.dtype,
                device=self.device,
            )

    def load(self, directory: Path) -> None:
        """Stand where the trainer stood that wrote `directory` with save()."""
        self.policy.load(directory / "trainer" / "policy")
        if self.critic is not None:
            self.critic.load(directory / "trainer" / "critic")
        counters = read_json(directory / "trainer.json")
        self.optimizer_steps = counters["optimizer_steps"]
        self.kl_coef = counters["kl_coef"]

    def rest(self) -> None:
        """Leave the device to another process."""
        for engine in filter(None, (self.policy, self.critic)):
            engine.rest()

    def resume(self) -> None:
        """Take the device again."""
        for engine in filter(None, (self.policy, self.critic)):
            engine.resume()

    def save(self, out: Path, *, rank: int) -> None:
        """Write the full state under `out`: trainer/ (DeepSpeed), trainer.json. Every rank must call it."""
        self.policy.save(out / "trainer" / "policy")
        if self.critic is not None:
            self.critic.save(out / "trainer" / "critic")
        if rank == 0:
            self._write_counters(out)

    def save_policy(self, out: Path, *, rank: int) -> None:
        """Write policy/ and trainer.json under `out`. Every rank must call it."""
        state = _own_names(self.policy.full_state())
        if rank == 0:
            merged = merged_state(self._language, state)
            export_policy(merged, like=self._language, tokenizer=self.tokenizer, directory=out / "policy")
            self._write_counters(out)

    def save_critic(self, out: Path, *, rank: int) -> None:
        """Write critic/ under `out`, where there is a critic. Every rank must call it."""
        if self.critic is not None:
            state = _own_names(self.critic.full_state())
            if rank == 0:
                write_model(state, like=self._scalar, tokenizer=self.tokenizer, directory=out / "critic")

    def _write_counters(self, out: Path) -> None:
        write_json(out / "trainer.json", {"optimizer_steps": self.optimizer_steps, "kl_coef": self.kl_coef})

    def split(
        self, rows: Rows, context: Context, *, passes: int, others: Sequence[PreTrainedModel] = ()
    ) -> list[Microbatch]:
        """This rank's microbatches of `rows` (with prompt_ids and completion_ids), balanced by tokens.

        passes: that policy and critic make over them; others: further models that do.
        """
        return deal(
            [rollout_cost(row) for row in rows],
            max_tokens=self.settings.trainer.max_tokens_per_microbatch,
            rank=context.rank,
            world_size=context.world_size,
            models=[self._language, *([self._scalar] if self.critic is not None else []), *others],
            passes=passes,
            count=context.count,
        )

    def batch(self, rows: Rows, microbatch: Microbatch) -> TokenBatch:
        """The packed tensors of one microbatch."""
        picked = [rows[index] for index in microbatch.rows]
        return TokenBatch.of(
            [row["prompt_ids"] for row in picked], [row["completion_ids"] for row in picked], device=self.device
        )

    def values(self, batch: TokenBatch) -> torch.Tensor:
        """Critic outputs before each completion token: values_M."""
        assert self.critic is not None, "only ppo has a critic"
        values_M: torch.Tensor = self.critic(batch.packed, batch.select_M)
        return values_M


def _prepare(model: PreTrainedModel, config: ModelConfig) -> None:
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.lora is not None:
        if config.gradient_checkpointing:
            model.enable_input_require_grads()
        add_adapters(model, config.lora)


def _own_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
