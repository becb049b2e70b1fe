"""Digests of the user's own files, remembered by path, size, modification time and inode. Opens no format."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from stages.artifacts.durable import canonical_json, digest_bytes, digest_file, read_json, write_json


class DigestCache:
    """sha256 of files; a file is read again only when its size, time or inode has changed.

    path: the JSON file that remembers; None remembers nothing. Written when the context closes.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._fresh: dict[str, str] = {}

    def __enter__(self) -> DigestCache:
        try:
            known = read_json(self._path) if self._path is not None else {}
        except (OSError, ValueError):
            known = {}
        if isinstance(known, dict):
            self._known = {key: value for key, value in known.items() if isinstance(value, str)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None and not self._fresh.keys() <= self._known.keys():
            write_json(self._path, self._known | self._fresh)

    def file(self, path: Path) -> str:
        """sha256 of one file, hex. Raises OSError."""
        status = os.stat(path)
        key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
        if key not in self._fresh:
            self._fresh[key] = self._known.get(key) or digest_file(path)
        return self._fresh[key]

    def directory(self, path: Path) -> str:
        """One digest over the names and contents of every file below `path`. Raises OSError."""
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return digest_bytes(canonical_json({p.relative_to(path).as_posix(): self.file(p) for p in files}))
