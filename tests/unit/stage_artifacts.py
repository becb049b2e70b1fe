"""Little committed artifacts in a temporary store, made through the real store, for tests that call a stage's run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from stages.artifacts import layout
from stages.artifacts.durable import canonical_json
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.schemas import LOGPROBS, REWARDS, ROLLOUTS
from stages.artifacts.shards import write_table
from stages.artifacts.store import commit, new_attempt
from stages.job import Job
from stages.program import Context

Row = dict[str, Any]
Run = Callable[[Any, Context], dict[str, float]]


class _Made(Job):
    """A job that stands for any stage; its content makes the name unique."""

    VERSION: ClassVar[int] = 1
    content: str


def no_artifact(stage: str) -> ArtifactRef:
    """A name that nothing is committed under."""
    return ArtifactRef(stage=stage, fingerprint="0" * 32)


def run_stage(run: Run, job: Job, **context: Any) -> tuple[Path, dict[str, float]]:
    """Run a stage in this process and commit it. Returns the artifact's directory and the metrics."""
    attempt = new_attempt(job)
    metrics = run(job, Context(out=attempt, **context))
    commit(job, attempt, metrics=metrics, wall_seconds=0.0)
    return job.ref.path(job.store), metrics


def commit_files(store: Path, stage: str, write: Callable[[Path], None], *, content: Any) -> ArtifactRef:
    """Commit whatever `write` puts into a directory, as if `stage` had made it. `content` makes the name unique."""
    made = type("Made", (_Made,), {"STAGE": stage})
    job = made(store=store, seed=0, content=canonical_json(content).decode())
    attempt = new_attempt(job)
    write(attempt)
    commit(job, attempt, metrics={}, wall_seconds=0.0)
    return job.ref


def commit_rollouts(store: Path, rows: Sequence[Row], *, shards: int = 1) -> ArtifactRef:
    """Rollouts, dealt out over `shards` files."""

    def write(out: Path) -> None:
        for index in range(shards):
            write_table(layout.shard(out, "rollouts", index), list(rows[index::shards]), ROLLOUTS)

    return commit_files(store, "generate_rollouts", write, content=[list(rows), shards])


def commit_rewards(store: Path, rows: Sequence[Row]) -> ArtifactRef:
    """Rewards in long form."""
    return commit_files(
        store,
        "score_rollouts",
        lambda out: write_table(layout.shard(out, "rewards", 0), list(rows), REWARDS),
        content=[repr(row) for row in rows],
    )


def commit_logprobs(store: Path, rows: Sequence[Row]) -> ArtifactRef:
    """Logprobs and values."""
    return commit_files(
        store,
        "compute_logprobs",
        lambda out: write_table(layout.shard(out, "logprobs", 0), list(rows), LOGPROBS),
        content=[repr(row) for row in rows],
    )


def rollout(prompt_id: str, sample_index: int, *, tokens: int = 3, **fields: Any) -> Row:
    """A rollout row; completion_ids are 10, 11, ..."""
    return {
        "round_index": 0,
        "prompt_id": prompt_id,
        "sample_index": sample_index,
        "group_id": f"0/{prompt_id}",
        "policy_version": "0" * 32,
        "prompt_ids": [1, 2],
        "completion_ids": list(range(10, 10 + tokens)),
        "rollout_logprobs": [-1.0] * tokens,
        "finish_reason": "stop",
        "prompt": "p",
        "completion": "c",
        "answer": "a",
    } | fields
