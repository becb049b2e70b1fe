"""What of a run is deleted, and when: the retention rule. Rollouts and what was computed from them never are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from configs.schema import Retention
from stages.artifacts import layout
from stages.artifacts.durable import read_json
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.store import can_release, release

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
    """Release what the rule does not keep and no other run of the store names. Returns bytes freed."""
    old = [ref for ref in superseded(refs, retention=retention, best=best) if can_release(store, ref)]
    if not old:
        return 0
    others = set(_named_by_others(store, run))
    return sum(release(store, ref) for ref in old if ref not in others)


def named_by(run_directory: Path) -> list[ArtifactRef]:
    """The releasable artifacts that a run has named so far, in the order of its rounds."""
    paths = [p for stage in _RELEASABLE for p in (run_directory / "jobs").glob(f"*-{stage}.json")]
    return [_ref(path, path.stat().st_mtime_ns) for path in sorted(paths)]


def _named_by_others(store: Path, run: str) -> Iterator[ArtifactRef]:
    for directory in layout.run_directory(store, run).parent.iterdir():
        if directory.name != run and directory.is_dir():
            yield from named_by(directory)


@cache
def _ref(path: Path, modified_ns: int) -> ArtifactRef:
    document = read_json(path)
    return ArtifactRef(stage=document["stage"], fingerprint=document["fingerprint"])
