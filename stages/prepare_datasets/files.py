"""Which files a source means: a file, a folder or a glob -> paths with names that do not depend on where they lie.

Reads no content. Light: neither datasets nor pyarrow.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path

from configs.sources import DataConfig, FileSource
from stages.artifacts.errors import InputError

KIND_OF_SUFFIX = {
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".json": "JSON",
    ".parquet": "Parquet",
    ".csv": "CSV",
    ".arrow": "Arrow",
}
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_EXPECTED = "expected a .jsonl, .json, .csv (each also .gz), .parquet or .arrow file"


@dataclass(frozen=True)
class SourceFile:
    """One input file. name: `<role>/<path inside the source>`, the same wherever the source lies."""

    path: Path
    name: str


def file_sources(data: DataConfig) -> dict[str, FileSource]:
    """The sources that are read from files or from the hub, by role."""
    sources = {"prompts": data.prompts, "demonstrations": data.demonstrations, "preferences": data.preferences}
    return {role: source for role, source in sources.items() if isinstance(source, FileSource)}


def locate(source: FileSource, *, role: str) -> list[SourceFile]:
    """The files of a local source, sorted by name. Raises InputError where there is nothing to read."""
    path = Path(source.path).expanduser()
    try:
        if path.is_dir():
            found = [SourceFile(p, f"{role}/{p.relative_to(path).as_posix()}") for p in _data_files(path)]
            if not found:
                raise InputError(f"data.{role}.path: {path}: {_EXPECTED} in this folder, found {_listing(path)}")
        elif path.is_file():
            found = [SourceFile(path, f"{role}/{path.name}")]
        elif not os.path.lexists(path) and glob.has_magic(str(path)):
            found = _matches(path, role=role)
        else:
            raise InputError(f"data.{role}.path: {_why_missing(path)}")
    except OSError as error:
        raise InputError(f"data.{role}.path: {path}: cannot be looked at: {error.strerror or error}") from None
    for file in found:
        if not os.access(file.path, os.R_OK):
            raise InputError(f"data.{role}.path: {file.path}: cannot be read (permission denied); change its mode")
    return sorted(found, key=lambda file: file.name)


def suffix_kind(path: Path) -> tuple[str | None, bool]:
    """The kind that a file's name promises (None for an unknown suffix), and whether it promises gzip."""
    packed = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix if packed else path.suffix
    return KIND_OF_SUFFIX.get(suffix.lower()), packed


def _data_files(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(root, name)
            if not name.startswith(".") and name not in _NOT_ROWS and suffix_kind(path)[0] and path.is_file():
                found.append(path)
    return found


def _raise(error: OSError) -> None:
    raise error


def _matches(pattern: Path, *, role: str) -> list[SourceFile]:
    fixed = Path(*(part for part in _until_magic(pattern.parts)))
    paths = [Path(match) for match in glob.glob(str(pattern), recursive=True) if os.path.isfile(match)]
    if not paths:
        raise InputError(f"data.{role}.path: {pattern}: expected files matching this pattern, found none")
    return [SourceFile(path, f"{role}/{path.relative_to(fixed).as_posix()}") for path in paths]


def _until_magic(parts: tuple[str, ...]) -> list[str]:
    for index, part in enumerate(parts):
        if glob.has_magic(part):
            return list(parts[:index])
    return list(parts)


def _why_missing(path: Path) -> str:
    if path.is_symlink():
        return f"{path}: expected a file or folder, found a link to {os.readlink(path)}, which cannot be followed"
    if path.exists():
        return f"{path}: expected a file or folder, found something else (a pipe, socket or device)"
    hint = "" if path.is_absolute() else f" (looked from {Path.cwd()})"
    return f"{path}: no such file or folder{hint}; correct the path, or set hub: true for a hub id"


def _listing(folder: Path) -> str:
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"
