"""Which stages of a run are committed, and those that stay as they are although the run's inputs have changed."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from stages.artifacts import layout
from stages.artifacts.durable import read_json, remove, write_json
from stages.artifacts.errors import InputError
from stages.artifacts.reference import ArtifactRef


def committed_stages(directory: Path, *, store: Path) -> dict[str, ArtifactRef]:
    """The run's finished stages by label, as its job files and their artifacts' manifests say. Hashes nothing."""
    found = {}
    for path in sorted((directory / "jobs").glob("*.json")):
        ref = reference_in(path)
        if ref is not None and (ref.path(store) / layout.MANIFEST).exists():
            found[path.stem] = ref
    return found


def keep_committed(directory: Path, *, store: Path) -> dict[str, ArtifactRef]:
    """From now on every stage that is committed stays as it is, whatever its recipe would be now."""
    kept = committed_stages(directory, store=store)
    write_json(layout.run_kept(directory), {label: ref.model_dump() for label, ref in kept.items()})
    return kept


def keep_nothing(directory: Path) -> None:
    """From now on recipes alone decide what is done."""
    remove(layout.run_kept(directory))


def kept_stages(directory: Path) -> dict[str, ArtifactRef]:
    """What keep_committed() wrote; nothing where it never did."""
    try:
        kept = read_json(layout.run_kept(directory))
        return {label: ArtifactRef.model_validate(ref) for label, ref in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{layout.run_kept(directory)}: expected the stages that were kept with --on-change keep, found "
            f"{type(error).__name__}; remove the file to have recipes alone decide what is done"
        ) from None


def reference_in(path: Path) -> ArtifactRef | None:
    """The artifact that a job file names; None where it cannot be read."""
    try:
        job = read_json(path)
        return ArtifactRef(stage=job["stage"], fingerprint=job["fingerprint"])
    except (OSError, ValueError, TypeError, KeyError, ValidationError):
        return None
