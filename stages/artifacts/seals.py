"""Finished files of an unfinished attempt: each is marked, so that a later attempt adopts it.

The mark lies beside the attempt, never in it: once the artifact is committed, its manifest speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts import durable
from stages.artifacts.durable import digest_file, read_json, write_json


class Seal(BaseModel):
    """What a mark says of its file. made_from: digest of what it was made from, where that could be something else
    another time. figures: what making it came to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    sha256: str
    bytes: int
    made_from: str = ""
    figures: dict[str, float] = {}


def seal(path: Path, *, made_from: str = "", figures: Mapping[str, float] | None = None) -> None:
    """Mark a finished file of an attempt. One that is made by hand needs no mark."""
    if path.parent.name.isdigit():
        found = Seal(
            sha256=digest_file(path), bytes=path.stat().st_size, made_from=made_from, figures=dict(figures or {})
        )
        write_json(_mark(path), found.model_dump())


def break_seals(attempt: Path) -> None:
    """Have no later attempt adopt anything of this one or of those before it."""
    if attempt.name.isdigit():
        for marks in sorted(attempt.parent.glob("*.sealed")):
            durable.remove(marks)


def find_sealed(name: str, *, attempts: Sequence[Path], made_from: str = "") -> tuple[Path, Seal] | None:
    """The first marked and undamaged file of that name that was made from that, and what its mark says."""
    for path in (attempt / name for attempt in attempts):
        mark = _read(_mark(path)) if path.exists() else None
        if mark is None or mark.made_from != made_from:
            continue
        if (mark.sha256, mark.bytes) == (digest_file(path), path.stat().st_size):
            return path, mark
    return None


def adopt(path: Path, *, earlier: Sequence[Path], made_from: str = "") -> Seal | None:
    """Take over a marked, undamaged file of the same name from an earlier attempt. None if there was none."""
    found = find_sealed(path.name, attempts=earlier, made_from=made_from)
    if found is None:
        return None
    old, mark = found
    durable.link(old, path)
    write_json(_mark(path), mark.model_dump())
    return mark


def _read(mark: Path) -> Seal | None:
    try:
        return Seal.model_validate(read_json(mark))
    except (OSError, ValueError, ValidationError):
        return None


def _mark(path: Path) -> Path:
    return path.parent.with_name(f"{path.parent.name}.sealed") / f"{path.name}.json"
