"""What of a run is deleted, and when: the retention rule. Rollouts and what was computed from them never are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from configs.schema import Retention
from stages.artifacts import layout
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.store import can_release, release
from tasks.kept import reference_in

_RELEASABLE = ("update_policy", "snapshot_trainer")


def superseded(refs: Sequence[ArtifactRef], *, retention: Retention, best: ArtifactRef | None) -> list[ArtifactRef]:
    """Those of a run's artifacts, oldest first, that the rule does not keep: old snapshots, old policies but the best.

    A run can go on without them: the newest snapshot and the rollouts since lead back to the last state, and a
    released policy that somebody asks for is made again.
    """
    snapshots = [ref for ref in refs if ref.stage == "snapshot_trainer"]
    policies = [ref for ref in refs if ref.stage == "update_policy"]
    old = snapshots[: -retention.snapshots]
    if retention.policies is not None:
        old += [ref for ref in policies[: -retention.policies] if ref != best]
    return old


def release_superseded(
    store: Path, run: str, refs: Sequence[ArtifactRef], *, retention: Retention, best: ArtifactRef | None
) -> int:
    """Release what the rule does not keep and no other run of the store names. Returns bytes freed.

    Where another run's job file cannot be read, nothing is: it may name anything.
    """
    old = [ref for ref in superseded(refs, retention=retention, best=best) if can_release(store, ref)]
    if not old:
        return 0
    others = {ref for path in _job_files_of_others(store, run) for ref in [_named_in(path, path.stat().st_mtime_ns)]}
    return 0 if None in others else sum(release(store, ref) for ref in old if ref not in others)


def named_by(run_directory: Path) -> list[ArtifactRef]:
    """The releasable artifacts that a run has named so far, in the order of its rounds."""
    named = (
        reference_in(path) for path in sorted(_job_files(run_directory), key=lambda path: layout.round_of(path.stem))
    )
    return [ref for ref in named if ref is not None]


def _job_files(run_directory: Path) -> Iterator[Path]:
    for stage in _RELEASABLE:
        yield from (run_directory / "jobs").glob(f"*-{stage}.json")


def _job_files_of_others(store: Path, run: str) -> Iterator[Path]:
    for directory in layout.run_directory(store, run).parent.iterdir():
        if directory.name != run and directory.is_dir():
            yield from _job_files(directory)


@cache
def _named_in(path: Path, modified_ns: int) -> ArtifactRef | None:
    return reference_in(path)
