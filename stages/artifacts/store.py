"""Commit, verify, quarantine, release: the only code that moves an artifact. Knows not what is inside files."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError

from stages.artifacts import layout
from stages.artifacts.durable import digest_file, make_directory, read_json, remove, rename, write_json
from stages.artifacts.errors import DamagedArtifact, GateError, LeaseHeld, ReleasedArtifact, StaleArtifact, StoreFull
from stages.artifacts.lease import Lease
from stages.artifacts.manifest import (
    UNREADABLE,
    FileEntry,
    Manifest,
    changed_parent,
    damaged,
    read_manifest,
    write_manifest,
)
from stages.artifacts.reference import ArtifactRef

if TYPE_CHECKING:
    from stages.job import Job

_UNFINISHED_MARK = re.compile(rf"\.{re.escape(layout.RELEASED)}\.\d+\.tmp")


def new_attempt(job: Job) -> Path:
    """A fresh, empty directory for one try at `job`, in the store's own file system."""
    parent = layout.attempts(job.store, job.STAGE, job.fingerprint)
    make_directory(parent)
    number = max((int(p.name) for p in parent.iterdir() if p.name.isdigit()), default=0) + 1
    path = parent / f"{number:04d}"
    make_directory(path)
    return path


def newest_attempt(job: Job) -> Path | None:
    """The unfinished try that is under way, or was."""
    parent = layout.attempts(job.store, job.STAGE, job.fingerprint)
    try:
        return max(path for path in parent.iterdir() if path.name.isdigit())
    except (FileNotFoundError, ValueError):
        return None


def earlier_attempts(attempt: Path) -> list[Path]:
    """Unfinished tries of the same artifact, newest first: finished shards in them are adopted, not redone."""
    if not attempt.name.isdigit():
        return []
    others = [p for p in attempt.parent.iterdir() if p.name.isdigit() and int(p.name) < int(attempt.name)]
    return sorted(others, reverse=True)


def commit(
    job: Job, attempt: Path, *, metrics: dict[str, float], wall_seconds: float, leases: Sequence[Lease] = ()
) -> Manifest:
    """Write the manifest, rename the attempt into place, and clear away what earlier tries left.

    An artifact that somebody else committed meanwhile is kept: same recipe, same thing. Raises LeaseHeld if one of
    `leases` was taken over, and GateError if a rebuilt artifact is not what it was before it was damaged.
    """
    _require(leases)
    manifest = write_manifest(job, attempt, metrics=metrics, wall_seconds=wall_seconds)
    _require_the_same_as_before(job, manifest)
    _require(leases)
    try:
        rename(attempt, job.ref.path(job.store))
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        manifest = read_manifest(job.store, job.ref) or manifest
    try:
        _require(leases)
    except LeaseHeld:
        return manifest  # what lies in attempts/ is the new owner's
    clear_attempts(job)
    return manifest


def _require(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.require()


def clear_attempts(job: Job) -> None:
    """Remove what tries of a committed artifact left."""
    attempts = layout.attempts(job.store, job.STAGE, job.fingerprint)
    if attempts.exists():
        remove(attempts)


def _require_the_same_as_before(job: Job, manifest: Manifest) -> None:
    """Gate: an artifact that is made again after damage or release has the bits that it had, where bits are promised.

    A quarantined manifest whose signature does not match says nothing: it may be what was damaged.
    """
    kept = layout.quarantine(job.store, job.STAGE, job.fingerprint)
    for path in sorted(kept.parent.glob(f"{kept.name}-*/{layout.MANIFEST}")):
        try:
            before = Manifest.model_validate(read_json(path))
        except (OSError, ValueError, ValidationError):
            continue
        comparable = before.is_genuine() and before.ref == job.ref and before.libraries == manifest.libraries
        comparable = comparable and before.parents == manifest.parents
        if comparable and manifest.determinism == before.determinism == "A" and before.files != manifest.files:
            names = sorted(n for n in before.files | manifest.files if before.files.get(n) != manifest.files.get(n))
            raise GateError(
                f"{job.ref} was made again and differs in {names[0]} ({len(names)} of {len(before.files)} files) from "
                f"{path.parent}; expected the same bits. Was the code changed without raising its VERSION? To accept "
                "the new one, move the old one away"
            )


_verified: dict[tuple[str, int, int, int, int], str] = {}


def verify(store: Path, ref: ArtifactRef) -> Manifest | None:
    """Re-hash every file of an artifact. None if it is not committed. Raises DamagedArtifact naming the file.

    A file is hashed once per process for as long as its size, inode, modification and change times stay. Of a
    released artifact the manifest and the files beside it are left to verify.
    """
    manifest = read_manifest(store, ref)
    if manifest is not None:
        released = is_released(store, ref)
        files = {name: entry for name, entry in manifest.files.items() if not (released and "/" in name)}
        verify_files(ref.path(store), files, ref, only_top=released)
    return manifest


def verify_files(root: Path, files: dict[str, FileEntry], ref: ArtifactRef, *, only_top: bool = False) -> None:
    """Compare what is below `root` with `files`. Raises DamagedArtifact naming the first difference.

    What a killed process left of a mark that it was writing does not count; the next release() takes it away.
    """
    paths = root.glob("*" if only_top else "**/*")
    found = {p.relative_to(root).as_posix() for p in paths if not p.is_dir() or p.is_symlink()}
    found = {name for name in found if not _UNFINISHED_MARK.fullmatch(name)}
    for name in sorted((found - {layout.MANIFEST, layout.RELEASED}) ^ set(files)):
        raise damaged(ref, root / name, "not in the manifest" if name in found else "missing")
    for name, entry in files.items():
        path = root / name
        status = path.lstat()
        if path.is_symlink() or status.st_size != entry.bytes:
            raise damaged(ref, path, f"expected {entry.bytes} bytes, found {status.st_size}")
        key = (str(path), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        try:
            digest = _verified.get(key) or _verified.setdefault(key, digest_file(path))
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            raise damaged(ref, path, f"cannot be read: {error.strerror}") from None
        if digest != entry.sha256:
            raise damaged(ref, path, f"expected sha256 {entry.sha256[:16]}…, found {digest[:16]}…")


def open_artifact(store: Path, ref: ArtifactRef) -> Path:
    """The directory of a committed artifact, verified. Raises DamagedArtifact, also where it is missing, and
    ReleasedArtifact where its files are gone by the retention rule."""
    if verify(store, ref) is None:
        _nothing(store, ref)
    if is_released(store, ref):
        raise ReleasedArtifact(
            f"{ref} is needed, but its files were released to save space; it is made again from the rollouts",
            stage=ref.stage,
            fingerprint=ref.fingerprint,
        )
    return ref.path(store)


def require_parents(store: Path, manifest: Manifest) -> None:
    """Raise StaleArtifact if something that an artifact was made from was made again since, to something else."""
    parent = changed_parent(store, manifest)
    if parent is not None:
        raise StaleArtifact(
            f"{manifest.ref} was made from another {parent} than the one that is there now",
            stage=manifest.stage,
            fingerprint=manifest.fingerprint,
        )


def is_released(store: Path, ref: ArtifactRef) -> bool:
    """Whether only the manifest of a committed artifact is kept."""
    return (ref.path(store) / layout.RELEASED).exists()


def release(store: Path, ref: ArtifactRef) -> int:
    """Delete a committed artifact's directories (models, trainer state), keep its manifest and the files beside it.

    It still counts as done. Returns the bytes freed. The mark comes first: a crash in between leaves directories that
    nobody opens, and the next release deletes them.
    """
    if read_manifest(store, ref) is None:
        return 0
    root = ref.path(store)
    freed, mark = 0, {"released_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if not is_released(store, ref):
        for left in root.glob(f".{layout.RELEASED}.*.tmp"):
            remove(left)
        try:
            write_json(root / layout.RELEASED, mark)
        except StoreFull:  # not even for the mark: a crash from here on leaves an artifact that counts as damaged
            freed += _remove_first(root)
            write_json(root / layout.RELEASED, mark)
    while _directories(root):
        freed += _remove_first(root)
    return freed


def _remove_first(root: Path) -> int:
    path = _directories(root)[0]
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    remove(path)
    return size


def can_release(store: Path, ref: ArtifactRef) -> bool:
    """Whether there is anything left to delete."""
    return ref.path(store).is_dir() and bool(_directories(ref.path(store)))


def _directories(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())


def put_aside(store: Path, ref: ArtifactRef, *, take_over: bool) -> Path | None:
    """Move an artifact that cannot be used to quarantine, never deleting it. Returns where it is now.

    Looks again with the artifact's lease held, and leaves alone what another run has made whole meanwhile. Raises
    LeaseHeld.
    """
    lock = layout.lock(store, ref.stage, ref.fingerprint)
    with Lease(lock, what=f"artifact {ref}", take_over=take_over):
        _verified.clear()  # what a disk has lost keeps its times
        try:
            require_parents(store, read_manifest(store, ref) or _nothing(store, ref))
            open_artifact(store, ref)
        except DamagedArtifact:
            return move_to_quarantine(store, ref)
    return None


def _nothing(store: Path, ref: ArtifactRef) -> NoReturn:
    raise damaged(ref, ref.path(store), "expected a committed artifact, found nothing")


def move_to_quarantine(store: Path, ref: ArtifactRef) -> Path:
    """Move a damaged artifact out of the way, never deleting it. Returns where it is now."""
    target = layout.quarantine(store, ref.stage, f"{ref.fingerprint}-{time.time_ns()}")
    if ref.path(store).exists():
        rename(ref.path(store), target)
    return target
