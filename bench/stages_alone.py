"""Stages without a flow: resident workers that take turns on one device, and a store for what they make."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stages.artifacts import layout, store
from stages.artifacts.durable import write_json
from stages.artifacts.reference import ArtifactRef
from stages.job import Compute, Job
from stages.workers import PoolSpec, WorkerPool

Row = dict[str, Any]


@dataclass
class House:
    """A scratch store and the two resident pools; makes artifacts as a task does, one after the other."""

    store: Path
    device: Literal["cpu", "cuda"]
    threads: int
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        shared: dict[str, Any] = {"ranks": 1, "device": self.device, "threads": self.threads, "takes_turns": True}
        self.gpus = (0,) if self.device == "cuda" else ()
        kinds: tuple[Literal["trainer", "generator"], ...] = ("trainer", "generator")
        self.pools = {
            kind: WorkerPool(
                PoolSpec(kind=kind, gpus=self.gpus, **shared), logs=self.store / "logs", stall_seconds=1800
            )
            for kind in kinds
        }

    @property
    def compute(self) -> Compute:
        """What every model's stage runs on."""
        return Compute(device=self.device, ranks=1, threads=self.threads, gpus=self.gpus)

    def make(self, job: Job, *, round_index: int = -1) -> ArtifactRef:
        """Run and commit one job; the other pool leaves the device first. Notes what that took."""
        pool, other = (self.pools[kind] for kind in (job.WORKER, _OTHER[job.WORKER]))
        path = layout.run_job(self.store / "runs" / "gpu", f"{round_index}-{job.STAGE}-{job.fingerprint}")
        write_json(path, job.document())
        began = time.monotonic()
        other.rest(on_progress=_silent)
        rested = time.monotonic()
        attempt = store.new_attempt(job)
        metrics = pool.run(path, attempt, on_progress=_silent)
        worked = time.monotonic()
        store.commit(job, attempt, metrics=metrics, wall_seconds=worked - rested)
        started = pool.waited_seconds + pool.models_seconds
        row = {
            "stage": job.STAGE,
            "round_index": round_index,
            "rest_seconds": rested - began,
            "start_seconds": started,
            "work_seconds": worked - rested - started,
            "commit_seconds": time.monotonic() - worked,
            "tokens": metrics.get("generated_tokens", metrics.get("computed_tokens", 0.0)),
            "model_flops": metrics.get("model_flops", 0.0),
            "least_seconds": pool.least_seconds,
        }
        self.rows.append(row)
        print(
            f"{round_index:>3} {job.STAGE:<22} {row['work_seconds']:9.2f} s, rest {row['rest_seconds']:.2f} s, "
            f"start or wake {started:.2f} s",
            flush=True,
        )
        return job.ref

    def close(self) -> None:
        """End both pools."""
        for pool in self.pools.values():
            pool.close()


_OTHER: dict[str, Literal["trainer", "generator"]] = {"trainer": "generator", "generator": "trainer"}


def _silent(what: str, done: int, total: int) -> None:
    """Progress is for people, and this run is timed."""
