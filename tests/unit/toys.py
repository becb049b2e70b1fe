"""A stage of nothing, for tests of what every artifact has in common."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from stages.artifacts import store
from stages.job import Job


class Toy(Job):
    """A job with one parameter."""

    STAGE: ClassVar[str] = "toy"
    VERSION: ClassVar[int] = 3
    word: str = "a"


def committed(job: Job) -> Path:
    """An artifact of two files."""
    attempt = store.new_attempt(job)
    (attempt / "deep").mkdir()
    (attempt / "deep" / "weights").write_bytes(b"weights")
    (attempt / "rows").write_bytes(b"rows")
    store.commit(job, attempt, metrics={"loss": 0.5}, wall_seconds=1.0)
    return job.ref.path(job.store)
