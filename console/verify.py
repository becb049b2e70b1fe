"""From a model back to the data: every artifact on the way re-hashed against its signed manifest. Changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from configs.models import FromScratch
from stages.artifacts.errors import DamagedArtifact, InputError
from stages.artifacts.manifest import Manifest, changed_parent
from stages.artifacts.reference import ArtifactRef, references
from stages.artifacts.store import is_released, verify
from stages.prepare_datasets.digests import check_digests
from stages.prepare_datasets.job import PrepareDatasets
from stages.train_sft.job import TrainSft
from tasks.models import base_digest

Say = Callable[[str], None]
_DAMAGED = 4


def verify_lineage(path: Path, *, say: Say) -> int:
    """Walk from the artifact at `path` through all that it was made from. Returns 0, or 4 if anything differs."""
    started = time.monotonic()
    store, ref = locate(path)
    manifests, faults = walk(store, ref)
    for manifest in manifests:
        say(_line(store, manifest))
        faults += _changed_inputs(store, manifest)
    files = [entry for manifest in manifests for entry in manifest.files.values()]
    for title, counts in (
        ("libraries", Counter(f"{n} {v}" for m in manifests for n, v in sorted(m.libraries.items()))),
        ("git revisions", Counter(m.git_revision for m in manifests)),
        ("determinism levels", Counter(m.determinism for m in manifests)),
        ("seeds", Counter(str(m.job["seed"]) for m in manifests)),
    ):
        mixed = any(count != len(manifests) for count in counts.values())
        say(f"{title}: " + ", ".join(f"{name} ({count})" if mixed else name for name, count in counts.items()))
    for fault in faults:
        say(f"differs: {fault}")
    verdict = f"{len(faults)} differ" if faults else "every one matches its signed manifest"
    say(
        f"{len(manifests)} artifacts, {len(files)} files, {sum(f.bytes for f in files) / 1e6:.1f} MB in "
        f"{time.monotonic() - started:.1f} s: {verdict}"
    )
    return _DAMAGED if faults else 0


def locate(path: Path) -> tuple[Path, ArtifactRef]:
    """The store and the artifact that a path lies in. Raises InputError."""
    parts = path.resolve().parts
    for index in range(len(parts) - 2, 0, -1):
        if parts[index] == "artifacts" and len(parts) > index + 2:
            return Path(*parts[:index]), ArtifactRef(stage=parts[index + 1], fingerprint=parts[index + 2])
    raise InputError(
        f"{path}: expected a path inside an artifact, such as <store>/artifacts/<stage>/<fingerprint> or "
        f"<store>/runs/<run>/last; found {path.resolve()}"
    )


def walk(store: Path, start: ArtifactRef) -> tuple[list[Manifest], list[str]]:
    """Every manifest that `start` was made from, itself first, each once, and what does not match."""
    manifests: list[Manifest] = []
    faults: list[str] = []
    todo, seen = [start], {start}
    while todo:
        ref = todo.pop(0)
        try:
            manifest = verify(store, ref)
        except DamagedArtifact as error:
            faults.append(str(error))
            continue
        if manifest is None:
            faults.append(f"{ref}: expected a committed artifact, found nothing in {store}")
            continue
        manifests.append(manifest)
        changed = changed_parent(store, manifest)
        if changed is not None:
            faults.append(f"{manifest.ref} was made from another {changed} than the one that is there now")
        for parent in references(manifest.job.get("inputs", {})):
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return manifests, faults


def _line(store: Path, manifest: Manifest) -> str:
    size = sum(entry.bytes for entry in manifest.files.values()) / 1e6
    released = "  released: manifest and figures only" if is_released(store, manifest.ref) else ""
    return f"{manifest.ref!s:<56} {len(manifest.files):>3} files {size:>9.2f} MB  {manifest.written_at}{released}"


def _changed_inputs(store: Path, manifest: Manifest) -> list[str]:
    """The user's own files that an artifact was made from, re-hashed where they are."""
    document = manifest.job | {"store": store}
    try:
        if manifest.stage == PrepareDatasets.STAGE:
            parameters = PrepareDatasets.model_validate(document).parameters
            check_digests(parameters.data, parameters.digests)
        elif manifest.stage == TrainSft.STAGE:
            sft = TrainSft.model_validate(document).parameters
            base = sft.model.base
            if not isinstance(base, FromScratch) and base_digest(base, store=store) != sft.base_digest:
                return [f"base model {base.path}: its files are not those that the run began with"]
    except (InputError, ValidationError) as error:
        return [str(error).splitlines()[0]]
    return []
