"""What a finished run did and when, read from its store: every stage's figures and the moment of its commit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.artifacts import layout
from stages.artifacts.schemas import ROLLOUTS
from stages.artifacts.shards import read_table


@dataclass(frozen=True)
class StageTime:
    """One stage of a run. committed_at: when its manifest was written, seconds since the epoch.

    seconds: what making it took by its own manifest. round_index: -1 outside the rounds.
    """

    label: str
    stage: str
    round_index: int
    seconds: float
    committed_at: float
    metrics: dict[str, float]
    path: Path

    @property
    def is_round(self) -> bool:
        """Whether it is a step of a training round, no evaluation."""
        return self.label.startswith("round-")


def stage_times(store: Path) -> list[StageTime]:
    """Every stage of the newest run of a store, in the order of commits."""
    runs = sorted((store / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise SystemExit(f"{store / 'runs'}: expected a finished run, found none")
    found = []
    for job_path in (runs[-1] / "jobs").glob("*.json"):
        job = json.loads(job_path.read_text())
        path = layout.artifact(store, job["stage"], job["fingerprint"])
        mark = path / layout.MANIFEST
        if not mark.exists():
            continue
        manifest = json.loads(mark.read_text())
        found.append(
            StageTime(
                label=job_path.stem,
                stage=job["stage"],
                round_index=layout.round_of(job_path.stem),
                seconds=manifest["wall_seconds"],
                committed_at=mark.stat().st_mtime,
                metrics=manifest["metrics"],
                path=path,
            )
        )
    return sorted(found, key=lambda stage: stage.committed_at)


def of_rounds(stages: list[StageTime], stage: str) -> dict[int, StageTime]:
    """One kind of stage, by round."""
    return {found.round_index: found for found in stages if found.is_round and found.stage == stage}


def round_ends(stages: list[StageTime]) -> list[float]:
    """When each round's policy was committed, in the order of rounds."""
    updates = of_rounds(stages, "update_policy")
    return [updates[index].committed_at for index in sorted(updates)]


def rollouts_of(path: Path, *columns: str) -> list[dict[str, Any]]:
    """Columns of every rollout of a committed generate_rollouts artifact, in file order."""
    shards = sorted(path.glob("rollouts-?????.arrow"))
    return [row for shard in shards for row in read_table(shard, ROLLOUTS, columns=columns).to_pylist()]
