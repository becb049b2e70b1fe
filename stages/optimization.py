"""One update: the optimizer steps of a round on a trainer, from the round's committed files alone.

Knows the loss by its name in the settings, not the algorithm. Made once when the round is new, and again (redo) when
a lost trainer is brought back; the same files give the same bits.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from configs.algorithms import Ppo
from stages.artifacts import schemas
from stages.artifacts.errors import GateError
from stages.artifacts.seeds import seed_at
from stages.artifacts.shards import by_key, read_rows, same_keys
from stages.artifacts.store import open_artifact
from stages.engines.deepspeed_engine import sum_over_ranks
from stages.engines.schedule import learning_rate
from stages.models.batches import Microbatch, minibatches, named
from stages.models.work import FORWARD_AND_BACKWARD
from stages.program import Context
from stages.rl.aggregation import token_weights
from stages.rl.kl import KlLimits, adaptive_kl_coefficient, kl_estimate
from stages.rl.losses import policy_loss, value_loss_clip
from stages.rl.mismatch import mismatch, mismatch_weights
from stages.trainer import Trainer
from stages.update_policy.job import UpdatePolicy

Row = dict[str, Any]
_OPTIONAL = ("ref_logprobs", "values", "returns")
_COLUMNS = ("old_logprobs", "advantages", *_OPTIONAL)


@dataclass(frozen=True)
class Update:
    """What an update was made of. steps: the figures of each optimizer step. completion_tokens: trained on."""

    steps: list[dict[str, float]]
    completion_tokens: int


def update(job: UpdatePolicy, trainer: Trainer, context: Context) -> Update:
    """Move `trainer`, which stands at the job's state, by every optimizer step of the round."""
    rows = joined_rows(job)
    steps = _make_steps(job, trainer, rows, context)
    _adapt_kl(trainer, rows)
    return Update(steps=steps, completion_tokens=sum(len(row["completion_ids"]) for row in rows))


def joined_rows(job: UpdatePolicy) -> list[Row]:
    """The round's rows in canonical order, files joined by key."""
    tables = {}
    for name, schema in (
        ("rollouts", schemas.ROLLOUTS),
        ("logprobs", schemas.LOGPROBS),
        ("advantages", schemas.ADVANTAGES),
    ):
        directory = open_artifact(job.store, getattr(job.inputs, name))
        tables[name] = by_key(read_rows(directory, name, schema), where=name)
        same_keys(tables["rollouts"], tables[name], left_name="rollouts", right_name=name)
    rows = [
        tables["rollouts"][key] | tables["logprobs"][key] | tables["advantages"][key]
        for key in sorted(tables["rollouts"])
    ]
    _refuse_unusable(rows, num_minibatches=job.parameters.settings.algorithm.num_minibatches)
    return rows


def _refuse_unusable(rows: list[Row], *, num_minibatches: int) -> None:
    """Gate: rows enough for every optimizer step, and a finite number per completion token in each column."""
    if len(rows) < num_minibatches:
        raise GateError(f"expected at least {num_minibatches} rollouts, one per minibatch, found {len(rows)}")
    for row in rows:
        for name in _COLUMNS:
            values, expected = row[name], len(row["completion_ids"])
            if len(values) not in (expected, 0 if name in _OPTIONAL else expected):
                raise GateError(f"{_key(row)}: expected {expected} {name}, one per token, found {len(values)}")
            for value in values:
                if not math.isfinite(value):
                    raise GateError(f"{_key(row)}: expected finite {name}, found {value}; no optimizer step was made")


def _key(row: Row) -> str:
    return f"rollout prompt_id {row['prompt_id']}, sample_index {row['sample_index']}"


def _make_steps(job: UpdatePolicy, trainer: Trainer, rows: list[Row], context: Context) -> list[dict[str, float]]:
    algorithm = job.parameters.settings.algorithm
    first = trainer.optimizer_steps
    total = algorithm.epochs * algorithm.num_minibatches
    steps: list[dict[str, float]] = []
    for epoch in range(algorithm.epochs):
        seed = seed_at(job.seed, job.STAGE, job.parameters.round_index, epoch)
        for chosen in minibatches([row["group_id"] for row in rows], count=algorithm.num_minibatches, seed=seed):
            minibatch = [rows[i] for i in chosen]
            steps.append(_Step(job, trainer, minibatch, context).make())
            trainer.optimizer_steps += 1
            context.progress("optimizer steps", len(steps), total)
    if trainer.optimizer_steps != first + total or not steps:
        raise GateError(f"made {trainer.optimizer_steps - first} optimizer steps; expected {total}, and at least one")
    return steps


def _adapt_kl(trainer: Trainer, rows: list[Row]) -> None:
    """Move the adaptive KL coefficient by the KL of this round's rollouts, where a target is set."""
    algorithm = trainer.settings.algorithm
    if algorithm.kl_target is None:
        return
    per_rollout = [
        sum(o - r for o, r in zip(row["old_logprobs"], row["ref_logprobs"], strict=True)) / len(row["old_logprobs"])
        for row in rows
    ]
    trainer.kl_coef = adaptive_kl_coefficient(
        trainer.kl_coef,
        kl=sum(per_rollout) / len(per_rollout),
        kl_target=algorithm.kl_target,
        kl_horizon=algorithm.kl_horizon,
        num_rollouts=len(rows),
    )


@dataclass
class _Step:
    """One optimizer step of policy and critic on one minibatch."""

    job: UpdatePolicy
    trainer: Trainer
    rows: list[Row]
    context: Context
    sums: dict[str, float] = field(default_factory=dict)

    def make(self) -> dict[str, float]:
        trainer, algorithm = self.trainer, self.job.parameters.settings.algorithm
        lengths = torch.tensor([len(row["completion_ids"]) for row in self.rows])
        self.weights = token_weights(
            lengths,
            aggregation=algorithm.aggregation,
            horizon_tokens=algorithm.max_completion_tokens,
            included_B=torch.tensor([not self._is_left_out(row) for row in self.rows]),
        )
        batches = trainer.split(self.rows, self.context, passes=FORWARD_AND_BACKWARD)
        coordinates = (self.job.parameters.round_index, trainer.optimizer_steps, self.context.rank)
        torch.manual_seed(seed_at(self.job.seed, self.job.STAGE, *coordinates))
        rate = learning_rate(algorithm.policy_optimizer, step=trainer.optimizer_steps, num_steps=None)
        step = f"round {self.job.parameters.round_index}, optimizer step {trainer.optimizer_steps}"
        where = partial(named, step, self.rows)
        norms = {"policy_grad_norm": trainer.policy.step(batches, self._policy_loss, rate=rate, where=where)}
        if trainer.critic is not None and isinstance(algorithm, Ppo):
            critic_rate = learning_rate(algorithm.critic_optimizer, step=trainer.optimizer_steps, num_steps=None)
            norms["critic_grad_norm"] = trainer.critic.step(
                batches, self._value_loss, rate=critic_rate, where=partial(named, f"{step} of the critic", self.rows)
            )
        names = sorted(self.sums)
        totals = dict(zip(names, sum_over_ranks([self.sums[name] for name in names]), strict=True))
        tokens = totals.pop("tokens")
        means = {n: t if n.endswith("_loss") else t / tokens for n, t in totals.items()}
        if algorithm.max_kl_to_old is not None and not means["kl_to_old"] <= algorithm.max_kl_to_old:
            raise GateError(
                f"{step}: expected at most {algorithm.max_kl_to_old} nats per token between the policy and the one "
                f"that sampled the round (algorithm.max_kl_to_old), found {means['kl_to_old']:.4g}; nothing of the "
                "round is kept"
            )
        return means | norms | {"learning_rate": rate}

    def _columns(self, microbatch: Microbatch, *names: str) -> list[torch.Tensor]:
        """The named per-token columns of a microbatch, flat, in the order of its completion tokens."""
        device = self.trainer.device
        return [
            torch.tensor([x for i in microbatch.rows for x in self.rows[i][name]], dtype=torch.float32, device=device)
            for name in names
        ]

    def _is_left_out(self, row: Row) -> bool:
        """Whether no token of the row counts: it was cut before its end, and such are not trained on."""
        return self.job.parameters.settings.algorithm.truncated == "mask" and row["finish_reason"] == "length"

    def _weights(self, microbatch: Microbatch, lengths: tuple[int, ...]) -> torch.Tensor:
        """Each token's weight in the loss of the whole optimizer step: weights_N."""
        per_row = self.weights[list(microbatch.rows)] * (0.0 if microbatch.is_filler else 1.0)
        return per_row.repeat_interleave(torch.tensor(lengths)).to(self.trainer.device)

    def _add(self, **sums: torch.Tensor) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def _policy_loss(self, microbatch: Microbatch) -> torch.Tensor:
        algorithm = self.job.parameters.settings.algorithm
        batch = self.trainer.batch(self.rows, microbatch)
        logprobs, entropy = self.trainer.policy(
            batch.packed, batch.select_M, batch.targets_M, self.job.parameters.temperature
        )
        names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
        old, rollout, ref, advantages = self._columns(microbatch, *names)
        weights = self._weights(microbatch, batch.lengths)
        lengths = torch.tensor(batch.lengths)
        clip = policy_loss(
            algorithm.loss,
            logprobs,
            old_logprobs_N=old,
            advantages_N=advantages,
            lengths_B=lengths,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            log_ratio_limit=algorithm.log_ratio_limit,
        )
        token_loss = clip.loss
        if algorithm.mismatch is not None:
            correction = algorithm.mismatch.model_dump()
            token_loss = token_loss * mismatch_weights(old, rollout_logprobs_N=rollout, lengths_B=lengths, **correction)
        token_loss = token_loss - algorithm.entropy_coef * entropy
        if algorithm.kl_placement == "loss" and algorithm.kl_coef > 0:
            token_loss = token_loss + self.trainer.kl_coef * kl_estimate(
                logprobs,
                ref_logprobs=ref,
                estimator=algorithm.kl_estimator,
                limits=KlLimits(**asdict(algorithm.kl_limits)),
            )
        loss: torch.Tensor = (weights * token_loss).sum()
        with torch.no_grad():
            real = 0.0 if microbatch.is_filler else 1.0
            apart = mismatch(old, rollout_logprobs=rollout)
            self._add(
                tokens=torch.tensor(real * logprobs.numel()),
                policy_loss=loss,
                clip_fraction=clip.clipped.float().sum() * real,
                entropy=entropy.sum() * real,
                ratio=clip.ratio.sum() * real,
                mismatch_kl=apart.kl.sum() * real,
                mismatch_gap=apart.gap.sum() * real,
                mismatch_weight=apart.weight.sum() * real,
                kl_to_old=kl_estimate(old, ref_logprobs=logprobs, estimator="k3").sum() * real,
            )
        return loss

    def _value_loss(self, microbatch: Microbatch) -> torch.Tensor:
        algorithm = self.job.parameters.settings.algorithm
        assert isinstance(algorithm, Ppo)
        batch = self.trainer.batch(self.rows, microbatch)
        values, returns = self._columns(microbatch, "values", "returns")
        clip = value_loss_clip(
            self.trainer.values(batch), values=values, returns=returns, value_clip=algorithm.value_clip
        )
        loss: torch.Tensor = (self._weights(microbatch, batch.lengths) * clip.loss).sum()
        real = 0.0 if microbatch.is_filler else 1.0
        self._add(value_loss=loss.detach(), value_clip_fraction=clip.clipped.float().sum() * real)
        return loss
