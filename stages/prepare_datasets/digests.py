"""What is in the input files, as sha256: part of the recipe, checked before anything starts. Light: no datasets."""

from __future__ import annotations

from pathlib import Path

from configs.sources import DataConfig
from stages.artifacts.digests import DigestCache
from stages.artifacts.errors import InputError
from stages.prepare_datasets.files import file_sources, locate


def source_digests(data: DataConfig, cache: Path | None) -> dict[str, str]:
    """sha256 (hex) of every input file, keyed `<role>/<name inside the source>`; hub sources: `hub:<id>@<revision>`.

    cache: a JSON file that remembers digests by absolute path, size, modification time and inode; None: hash all.
    Raises InputError if a path does not exist, holds no data files, or cannot be read.
    """
    digests: dict[str, str] = {}
    with DigestCache(cache) as known:
        for role, source in file_sources(data).items():
            if source.hub:
                name = f"hub:{source.path}@{source.revision or 'main'}"
                digests[f"{role}/{name}"] = name
                continue
            for file in locate(source, role=role):
                try:
                    digests[file.name] = known.file(file.path)
                except OSError as error:
                    reason = error.strerror or error
                    raise InputError(f"data.{role}.path: {file.path}: cannot be read: {reason}") from None
    return digests


def check_digests(data: DataConfig, expected: dict[str, str]) -> None:
    """Raise InputError if the files are not those that the job was planned with."""
    found = source_digests(data, None)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            was, now = (str(d.get(name) or "no such file")[:16] for d in (expected, found))
            raise InputError(
                f"{name}: expected the file that this run was planned with (sha256 {was}), found {now}; "
                "run the flow again to plan with the data as it is now"
            )
