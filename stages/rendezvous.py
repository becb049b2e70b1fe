"""Where the ranks of one pool meet: a directory of their own, removed with the pool or, after a kill -9, by the next.

Knows nothing of processes: who still uses a directory holds a flock on it, and a dead process holds none.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "ratchet-rendezvous-"


class Rendezvous:
    """A new private directory under the system's temporary one. Making it removes those that nobody uses any more."""

    def __init__(self) -> None:
        remove_stale()
        self.path, self._descriptor = _claimed()

    def close(self) -> None:
        """Remove it. Again does nothing."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def remove_stale() -> int:
    """Remove this user's directories whose owner is dead; how many there were."""
    removed = 0
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # somebody else was faster
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _claimed() -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock; another process may remove it until it is locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return path, descriptor
        os.close(descriptor)
