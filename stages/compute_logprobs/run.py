"""compute_logprobs: the round's models look at its rollouts before anything is updated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from stages.artifacts import schemas
from stages.artifacts.errors import GateError
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.seals import break_seals
from stages.artifacts.store import open_artifact
from stages.compute_logprobs.job import ComputeLogprobs
from stages.engines.deepspeed_engine import sum_over_ranks
from stages.models.language import TokenLogprobs, load_policy
from stages.models.work import FORWARD
from stages.program import Context, Metrics
from stages.recovery import resident_trainer
from stages.rollout_shards import by_shard
from stages.trainer import Trainer

Row = dict[str, Any]
LogprobsOf = Callable[..., Any]
_OLDER = "sampling_policy"


def run(job: ComputeLogprobs, context: Context) -> Metrics:
    """Write one logprobs file per rank for each file of rollouts."""
    parameters = job.parameters
    trainer = resident_trainer(job, parameters.settings, job.inputs.state, context)
    reference = _reference(job, trainer, context)
    policy = _sampling_policy(job, trainer, reference, context)
    sampled_by = job.inputs.sampled_by or job.inputs.state.policy

    def look(rows: list[Row]) -> list[Row]:
        _require_version(rows, sampled_by.fingerprint)
        results = _forward(rows, trainer, policy, reference, parameters.temperature, context)
        return sorted(results, key=lambda result: (result["prompt_id"], result["sample_index"]))

    rows: list[Row] = []
    results: list[Row] = []
    rollouts = job.inputs.rollouts
    for read, made in by_shard(job, rollouts, context, kind="logprobs", schema=schemas.LOGPROBS, make=look):
        rows += read
        results += made
    if context.shard is not None:
        return {}
    context.live.pop(_OLDER, None)
    try:
        return _gate(rows, results, job, context)
    except GateError:
        if context.rank == 0:  # once its cause is gone they are computed anew
            break_seals(context.out)
        raise


def _sampling_policy(
    job: ComputeLogprobs, trainer: Trainer, reference: TokenLogprobs | None, context: Context
) -> LogprobsOf:
    """The policy that the rollouts are from: the trainer's own, or an older one, which is let go at the job's end."""
    sampled_by = job.inputs.sampled_by
    if sampled_by is None or sampled_by == job.inputs.state.policy:
        return trainer.policy
    if reference is not None and sampled_by == job.inputs.ref_policy:
        return reference
    held: tuple[str, TokenLogprobs] | None = context.live.get(_OLDER)
    if held is None or held[0] != sampled_by.fingerprint:
        context.live.pop(_OLDER, None)
        with context.starting():
            held = context.live[_OLDER] = (sampled_by.fingerprint, _frozen(job, sampled_by, trainer))
    return held[1]


def _require_version(rows: list[Row], expected: str) -> None:
    for row in rows:
        if row["policy_version"] != expected:
            raise GateError(
                f"rollout ({row['prompt_id']}, {row['sample_index']}) was sampled by policy {row['policy_version']}; "
                f"expected {expected}: stale weights in the generator"
            )


def _reference(job: ComputeLogprobs, trainer: Trainer, context: Context) -> TokenLogprobs | None:
    """The frozen reference, kept between rounds; None where no KL is asked for."""
    if job.inputs.ref_policy is None:
        return None
    key = ("ref_policy", job.inputs.ref_policy.fingerprint)
    if key not in context.live:
        with context.starting():
            context.live[key] = _frozen(job, job.inputs.ref_policy, trainer)
    reference: TokenLogprobs = context.live[key]
    return reference


def _frozen(job: ComputeLogprobs, policy: ArtifactRef, trainer: Trainer) -> TokenLogprobs:
    """A committed policy, to look with."""
    directory = open_artifact(job.store, policy) / "policy"
    model = load_policy(directory, dtype=job.parameters.settings.model.dtype).to(trainer.device)
    return TokenLogprobs(model).eval().requires_grad_(False)


@torch.no_grad()
def _forward(
    rows: list[Row],
    trainer: Trainer,
    policy: LogprobsOf,
    reference: TokenLogprobs | None,
    temperature: float,
    context: Context,
) -> list[Row]:
    trainer.policy.train(False)
    if trainer.critic is not None:
        trainer.critic.train(False)
    results: list[Row] = []
    others = [reference.model] if reference is not None else []
    batches = trainer.split(rows, context, passes=FORWARD, others=others)
    for done, microbatch in enumerate(batches):
        batch = trainer.batch(rows, microbatch)
        inputs = (batch.packed, batch.select_M, batch.targets_M, temperature)
        columns = {"old_logprobs": policy(*inputs)[0]}
        if reference is not None:
            columns["ref_logprobs"] = reference(*inputs)[0]
        pieces = {name: tensor.float().cpu().split(batch.lengths) for name, tensor in columns.items()}
        if trainer.critic is not None:
            read = trainer.value_batch(rows, microbatch)
            pieces["values"] = torch.split(trainer.values(read).float().cpu(), list(read.lengths))
        for place, index in enumerate(() if microbatch.is_filler else microbatch.rows):
            row = rows[index]
            result = {"prompt_id": row["prompt_id"], "sample_index": row["sample_index"]}
            result |= {"ref_logprobs": [], "values": []}
            results.append(result | {name: split[place].tolist() for name, split in pieces.items()})
        context.progress("logprobs", done + 1, len(batches))
    return results


def _gate(rows: list[Row], results: list[Row], job: ComputeLogprobs, context: Context) -> Metrics:
    """Compare the generator's and the trainer's logprobs: stale weights or a shifted mask show here first."""
    bound = job.parameters.max_mismatch
    sampled = {(row["prompt_id"], row["sample_index"]): row["rollout_logprobs"] for row in rows}
    worst, where, total, count = 0.0, "", 0.0, 0
    for result in results:
        key = (result["prompt_id"], result["sample_index"])
        columns = result | {"rollout_logprobs": sampled[key]}
        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values"):
            if not all(map(math.isfinite, columns[name])):
                raise GateError(f"rollout {key}: expected finite {name}, found {columns[name]}")
        for position, (ours, theirs) in enumerate(zip(result["old_logprobs"], sampled[key], strict=True)):
            difference = abs(ours - theirs)
            total, count = total + difference, count + 1
            if not difference <= worst:
                worst, where = difference, f"rollout {key}, completion token {position}"
    *of_ranks, total, tokens = sum_over_ranks(
        [*(worst if rank == context.rank else 0.0 for rank in range(context.world_size)), total, float(count)]
    )
    largest, mean = max(of_ranks), total / max(1.0, tokens)
    found, name = (largest, "largest") if job.parameters.settings.model.dtype == "float32" else (mean, "mean")
    if not found <= bound:
        raise GateError(
            f"generator and trainer disagree: {name} |old_logprobs - rollout_logprobs| is {found:.3g} nats "
            f"(worst here: {where}); expected at most {bound:g}; artifact not committed: {context.out}"
        )
    return {"logprob_difference_max": largest, "logprob_difference_mean": mean}


if __name__ == "__main__":
    from stages.program import main

    main("compute_logprobs")
