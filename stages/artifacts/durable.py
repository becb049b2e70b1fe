"""Writes that survive a crash: temporary name, fsync, rename, fsync of the directory. Knows no artifact.

Every file and directory that this house commits to a store goes through here, one operation at a time; what the
model libraries write is flushed and hashed here before it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.artifacts.room import room_for


def _untold(operation: str, path: Path) -> None:
    """Nobody is told."""


before_operation: Callable[[str, Path], None] = _untold
"""Told of each durable operation (write, fsync, rename, link, mkdir, unlink) just before it is made. The fault
tests put their own here, to die before the n-th."""


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, UTF-8, finite numbers only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_bytes(data: bytes) -> str:
    """sha256, lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """sha256 of a file's content, read in bounded pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Flush a finished file's content to the disk."""
    before_operation("fsync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk, so that a rename in it survives a power loss."""
    sync_file(path)


def make_directory(path: Path) -> None:
    """Make a directory and those above it; one that is there stays as it is."""
    if not path.is_dir():
        make_directory(path.parent)
        before_operation("mkdir", path)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def replace(source: Path, target: Path) -> None:
    """Put a finished file in its place, over an older one."""
    before_operation("rename", target)
    os.replace(source, target)
    sync_directory(target.parent)


def rename(source: Path, target: Path) -> None:
    """Move a directory to a name that is free. Raises OSError if it is not."""
    make_directory(target.parent)
    before_operation("rename", target)
    os.rename(source, target)
    sync_directory(target.parent)


def link(source: Path, target: Path) -> None:
    """Give a finished file a second name."""
    before_operation("link", target)
    os.link(source, target)


def remove(path: Path) -> None:
    """Delete a file or a directory with all that is in it; nothing there is fine."""
    before_operation("unlink", path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> None:
    """Remove the unfinished files that a killed process left below a directory that nobody else writes to."""
    for path in sorted(directory.rglob(".*.tmp")):
        remove(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `path` whole or not at all."""
    make_directory(path.parent)
    before_operation("write", path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with room_for(path, needed=len(data)):
        with temporary.open("wb") as file:
            file.write(data)
        sync_file(temporary)
        replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document for people and programs, whole or not at all."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """Read a JSON document."""
    return json.loads(path.read_bytes())
