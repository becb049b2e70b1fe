"""One update: the optimizer steps of a round on a trainer, from the round's committed files alone.

Knows the loss by its name in the settings, not the algorithm. Made once when the round is new, and again (redo) when
a lost trainer is brought back; the same files give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from configs.algorithms import Ppo
from stages.artifacts.errors import GateError
from stages.artifacts.seeds import seed_at
from stages.engines.deepspeed_engine import sum_over_ranks
from stages.engines.schedule import learning_rate
from stages.models.batches import Microbatch, minibatches, named
from stages.models.work import FORWARD_AND_BACKWARD
from stages.program import Context
from stages.rl.aggregation import token_weights
from stages.rl.kl import KlLimits, adaptive_kl_coefficient, kl_estimate
from stages.rl.losses import policy_loss, value_loss_clip
from stages.rl.mismatch import mismatch, mismatch_weights
from stages.round_rows import joined_rows
from stages.trainer import Trainer
from stages.update_policy.job import UpdatePolicy

Row = dict[str, Any]
_LEARNT = {"policy_grad_norm", "critic_grad_norm"}


@dataclass(frozen=True)
class Update:
    """What an update was made of. steps: the figures of each optimizer step. completion_tokens: trained on."""

    steps: list[dict[str, float]]
    completion_tokens: int


def update(job: UpdatePolicy, trainer: Trainer, context: Context) -> Update:
    """Move `trainer`, which stands at the job's state, by every optimizer step of the round."""
    rows = joined_rows(job)
    steps = _make_steps(job, trainer, rows, context)
    if not warms_up_critic(job):
        _adapt_kl(trainer, rows)
    return Update(steps=steps, completion_tokens=sum(len(row["completion_ids"]) for row in rows))


def warms_up_critic(job: UpdatePolicy) -> bool:
    """Whether the round is one in which the critic alone learns."""
    algorithm = job.parameters.settings.algorithm
    return isinstance(algorithm, Ppo) and job.parameters.round_index < algorithm.critic.warmup_rounds


def _make_steps(job: UpdatePolicy, trainer: Trainer, rows: list[Row], context: Context) -> list[dict[str, float]]:
    algorithm = job.parameters.settings.algorithm
    total = algorithm.epochs * algorithm.num_minibatches
    steps: list[dict[str, float]] = []
    for epoch in range(algorithm.epochs):
        seed = seed_at(job.seed, job.STAGE, job.parameters.round_index, epoch)
        for chosen in minibatches([row["group_id"] for row in rows], count=algorithm.num_minibatches, seed=seed):
            minibatch = [rows[i] for i in chosen]
            steps.append(_Step(job, trainer, minibatch, context).make())
            trainer.optimizer_steps += 1
            context.progress("optimizer steps", len(steps), total)
    made = sum(bool(step.keys() & _LEARNT) for step in steps)
    if made != total or not made:
        raise GateError(f"made {made} optimizer steps of the policy or the critic; expected {total}, and at least one")
    return steps


def _adapt_kl(trainer: Trainer, rows: list[Row]) -> None:
    """Move the adaptive KL coefficient by the KL of this round's rollouts, where a target is set.

    Not while the critic warms up: a policy that stays where it is would only make the coefficient shrink.
    """
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
        included_B = torch.tensor([not self._is_left_out(row) for row in self.rows])
        self.weights = token_weights(
            lengths,
            aggregation=algorithm.aggregation,
            horizon_tokens=algorithm.max_completion_tokens,
            included_B=included_B,
        )
        if trainer.critic is not None:
            self.value_weights = token_weights(
                torch.tensor([len(row["returns"]) for row in self.rows]),
                aggregation=algorithm.aggregation,
                horizon_tokens=algorithm.max_completion_tokens,
                included_B=included_B,
            )
        policy: Literal["learns", "stays"] = "stays" if warms_up_critic(self.job) else "learns"
        batches = trainer.split(self.rows, self.context, passes=FORWARD_AND_BACKWARD, policy=policy)
        coordinates = (self.job.parameters.round_index, trainer.optimizer_steps, self.context.rank)
        torch.manual_seed(seed_at(self.job.seed, self.job.STAGE, *coordinates))
        step = f"round {self.job.parameters.round_index}, optimizer step {trainer.optimizer_steps}"
        figures = self._step_policy(batches, where=partial(named, step, self.rows))
        if trainer.critic is not None and isinstance(algorithm, Ppo):
            critic_rate = learning_rate(algorithm.critic_optimizer, step=trainer.optimizer_steps, num_steps=None)
            figures["critic_grad_norm"] = trainer.critic.step(
                batches, self._value_loss, rate=critic_rate, where=partial(named, f"{step} of the critic", self.rows)
            )
        names = sorted(self.sums)
        totals = dict(zip(names, sum_over_ranks([self.sums[name] for name in names]), strict=True))
        tokens, values = totals.pop("tokens"), totals.pop("values", 0.0)
        means = {n: t if n.endswith("_loss") else t / tokens for n, t in totals.items()}
        if values:
            means["value_clip_fraction"] = totals["value_clip_fraction"] / values
        if algorithm.max_kl_to_old is not None and not means["kl_to_old"] <= algorithm.max_kl_to_old:
            raise GateError(
                f"{step}: expected at most {algorithm.max_kl_to_old} nats per token between the policy and the one "
                f"that sampled the round (algorithm.max_kl_to_old), found {means['kl_to_old']:.4g}; nothing of the "
                "round is kept"
            )
        return means | figures

    def _step_policy(
        self, batches: list[Microbatch], *, where: Callable[[Sequence[Microbatch]], str]
    ) -> dict[str, float]:
        """Move the policy; while the critic warms up, only look at the loss that would have moved it."""
        trainer, algorithm = self.trainer, self.job.parameters.settings.algorithm
        if warms_up_critic(self.job):
            trainer.policy.train(False)
            with torch.no_grad():
                losses = [float(self._policy_loss(batch)) for batch in batches]
            if not all(map(math.isfinite, losses)):
                raise GateError(f"{where(batches)}: losses are {losses}; expected finite numbers")
            return {"learning_rate": 0.0}
        rate = learning_rate(algorithm.policy_optimizer, step=trainer.policy_steps, num_steps=None)
        norm = trainer.policy.step(batches, self._policy_loss, rate=rate, where=where)
        trainer.policy_steps += 1
        return {"policy_grad_norm": norm, "learning_rate": rate}

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
        batch = self.trainer.value_batch(self.rows, microbatch)
        (values,) = self._columns(microbatch, "values")
        counted = [len(self.rows[i]["returns"]) for i in microbatch.rows]
        gaps = [read - count for read, count in zip(batch.lengths, counted, strict=True)]
        returns = self._padded([self.rows[i]["returns"] for i in microbatch.rows], gaps)
        real = 0.0 if microbatch.is_filler else 1.0
        each = (real * self.value_weights[list(microbatch.rows)]).tolist()
        weights = self._padded([[w] * count for w, count in zip(each, counted, strict=True)], gaps)
        counts = self._padded([[real] * count for count in counted], gaps)
        clip = value_loss_clip(
            self.trainer.values(batch), values=values, returns=returns, value_clip=algorithm.value_clip
        )
        loss: torch.Tensor = (weights * clip.loss).sum()
        self._add(
            values=counts.sum(), value_loss=loss.detach(), value_clip_fraction=(counts * clip.clipped.float()).sum()
        )
        return loss

    def _padded(self, rows: list[list[float]], gaps: list[int]) -> torch.Tensor:
        """Rows of numbers after one another, each followed by its gap of zeros: flat, float32."""
        numbers = [x for row, gap in zip(rows, gaps, strict=True) for x in (*row, *([0.0] * gap))]
        return torch.tensor(numbers, dtype=torch.float32, device=self.trainer.device)
