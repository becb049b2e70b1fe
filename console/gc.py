"""Freeing space in a store: superseded models by the retention rule, and what unfinished attempts left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.schema import Retention
from stages.artifacts import layout
from stages.artifacts.durable import read_json, remove
from stages.artifacts.errors import InputError, LeaseHeld
from stages.artifacts.lease import Lease
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.store import can_release
from tasks.retention import named_by, release_superseded, superseded

Say = Callable[[str], None]


def collect(store: Path, *, keep: dict[str, int | None], dry_run: bool, say: Say) -> None:
    """Free what no run needs. A run that is under way, and what it is making, is left alone. Raises InputError.

    keep: `snapshots` and `policies` instead of each run's own rule; None leaves it.
    """
    if not (store / "runs").is_dir():
        raise InputError(f"--store {store}: expected a store with runs, found none")
    freed = _free_attempts(store, besides=_of_live_runs(store), dry_run=dry_run, say=say)
    freed += _free_temporaries(store, dry_run=dry_run)
    for directory in sorted(path for path in (store / "runs").iterdir() if (path / "config.json").exists()):
        try:
            with Lease(directory / "lease", what=f"run {directory.name}"):
                freed += _free_run(store, directory, keep, dry_run=dry_run, say=say)
        except LeaseHeld as error:
            say(f"left alone: {error}")
    say(f"{freed / 1e6:.1f} MB {'would be ' if dry_run else ''}freed")


def _free_run(store: Path, directory: Path, changes: dict[str, int | None], *, dry_run: bool, say: Say) -> int:
    configured: dict[str, Any] = read_json(directory / "config.json").get("retention", {})
    retention = Retention.model_validate(configured | {k: v for k, v in changes.items() if v is not None})
    refs, best = named_by(directory), _best(directory)
    old = [ref for ref in superseded(refs, retention=retention, best=best) if can_release(store, ref)]
    if not old:
        return 0
    size = sum(_size(ref.path(store)) for ref in old)
    if not dry_run:
        size = release_superseded(store, directory.name, refs, retention=retention, best=best)
    say(f"{directory.name}: {len(old)} superseded models and trainer states, {size / 1e6:.1f} MB")
    return size


def _best(directory: Path) -> ArtifactRef | None:
    """The best policy, where the run's `best` points."""
    link = directory / "best"
    return ArtifactRef(stage="update_policy", fingerprint=link.resolve().parent.name) if link.is_symlink() else None


def _of_live_runs(store: Path) -> set[tuple[str, str]]:
    """What runs that are under way have asked for: they may have finished a part of it, and come back to it."""
    found = set()
    for directory in sorted((store / "runs").iterdir()):
        try:
            with Lease(directory / "lease", what=f"run {directory.name}"):
                continue
        except LeaseHeld:
            jobs = [read_json(path) for path in sorted((directory / "jobs").glob("*.json"))]
            found |= {(job["stage"], job["fingerprint"]) for job in jobs}
    return found


def _free_attempts(store: Path, *, besides: set[tuple[str, str]], dry_run: bool, say: Say) -> int:
    """Unfinished tries that nobody is at work on. Whoever makes the same thing next starts it from its beginning."""
    freed = 0
    for path in sorted(store.glob("attempts/*/*")):
        stage, fingerprint = path.parts[-2:]
        if (stage, fingerprint) in besides:
            continue
        try:
            with Lease(layout.lock(store, stage, fingerprint), what=f"artifact {stage}/{fingerprint}"):
                size = _size(path)
                say(f"unfinished {stage}/{fingerprint}: {size / 1e6:.1f} MB")
                freed += size
                if not dry_run:
                    remove(path)
        except LeaseHeld as error:
            say(f"left alone: {error}")
    return freed


def _free_temporaries(store: Path, *, dry_run: bool) -> int:
    """What a process that is dead now was writing at the top of the store, `.<name>.<pid>.tmp`."""
    freed = 0
    for path in store.glob(".*.tmp"):
        pid = path.stem.rpartition(".")[2]
        if pid.isdigit() and not Path("/proc", pid).exists():
            freed += path.stat().st_size
            if not dry_run:
                remove(path)
    return freed


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
