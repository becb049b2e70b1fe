"""Snapshots inside a training stage, so that a crash costs some steps and not the stage. Knows no stage by name.

They lie beside the attempts of the artifact and vanish with them when it is committed. Each is signed and written
whole or not at all, like a manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stages.artifacts import layout
from stages.artifacts.durable import make_directory, read_json, remove, rename, write_json
from stages.artifacts.errors import DamagedArtifact
from stages.artifacts.manifest import FileEntry, index_files
from stages.artifacts.signing import Signed
from stages.artifacts.store import verify_files
from stages.engines.deepspeed_engine import TrainingEngine
from stages.job import Job
from stages.program import Context

Figures = list[dict[str, Any]]
_STATE = "state"
_FIGURES = "figures.json"


class _Index(Signed):
    """What a snapshot holds."""

    fingerprint: str
    step: int
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class StageSnapshots:
    """The snapshots of one training stage. every: optimizer steps between them. total: steps of the stage.

    By hand with --out there are none: nobody resumes such a run.
    """

    job: Job
    context: Context
    every: int
    total: int

    @property
    def _directory(self) -> Path:
        return self.context.out.parent / layout.SNAPSHOTS

    def resume(self, engine: TrainingEngine) -> tuple[int, Figures]:
        """Load the newest undamaged snapshot; returns the step to go on with and the figures so far."""
        for path in sorted(self._directory.glob("????????"), reverse=True) if self._keeps() else []:
            index = self._read(path)
            if index is not None:
                self.context.progress("resuming from a snapshot at step", index.step, self.total)
                engine.load(path / _STATE)
                figures: Figures = read_json(path / _FIGURES)
                return index.step, figures
        return 0, []

    def after(self, step: int, engine: TrainingEngine, figures: Figures) -> None:
        """Make a snapshot if one is due after `step` steps, and drop the older ones. Every rank must call it."""
        if not self._keeps() or step % self.every or step >= self.total:
            return
        target = self._directory / f"{step:08d}"
        unfinished = target.with_name(f".{target.name}.tmp")
        if self.context.rank == 0:
            remove(unfinished)
            make_directory(unfinished)
        engine.barrier()
        engine.save(unfinished / _STATE)
        if self.context.rank == 0:
            write_json(unfinished / _FIGURES, figures)
            index = _Index(fingerprint=self.job.fingerprint, step=step, files=index_files(unfinished))
            write_json(unfinished / layout.MANIFEST, index.signed().model_dump(mode="json"))
            remove(target)
            rename(unfinished, target)
            for older in self._directory.iterdir():
                if older != target:
                    remove(older)

    def _keeps(self) -> bool:
        return self.context.out.name.isdigit()

    def _read(self, path: Path) -> _Index | None:
        """The index of a snapshot, if it and every file are as they were written."""
        try:
            index = _Index.model_validate(read_json(path / layout.MANIFEST))
            if not index.is_genuine() or index.fingerprint != self.job.fingerprint:
                raise ValueError(f"expected one of {self.job.ref}, signed as it is; found another, or an edited one")
            verify_files(path, index.files, self.job.ref)
        except (OSError, ValueError, ValidationError, DamagedArtifact) as error:
            print(f"snapshot {path} is not used: {error}", flush=True)
            return None
        return index
