"""Files that other users of the machine can neither read nor change. Knows modes, not what is in the files."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

from stages.artifacts.errors import InputError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def keep_files_private() -> None:
    """From now on this process and its children make files 0600 and directories 0700, and dump no memory to disk.

    To be called where a process starts, never on import.
    """
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def require_own_store(store: Path) -> None:
    """Raise InputError if other users can change what is in the store: they could plant artifacts and jobs."""
    for path in (store, *(store / name for name in ("artifacts", "attempts", "locks", "quarantine", "runs"))):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        shared_like_tmp = path == store and mode & stat.S_ISVTX
        if mode & _OTHERS_WRITE and not shared_like_tmp:
            raise InputError(
                f"store {path}: expected a directory that only its owner can write to, found mode "
                f"{stat.S_IMODE(mode):04o}; run `chmod go-w {path}`, or set store to another directory"
            )


def private_directory(path: Path) -> Path:
    """Make a directory of one's own, 0700, or check that it is one. Raises InputError.

    For caches from which libraries load code unseen.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise InputError(
            f"cache {path}: expected a directory of user {os.geteuid()}, found one of user {found.st_uid}; "
            "set XDG_CACHE_HOME to a directory of your own"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path
