"""One owner per run directory and per artifact: flock and an owner file. A dead owner's lease is free at once."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from stages.artifacts.errors import LeaseHeld


class Lease:
    """Exclusive ownership of `path`, for as long as this process lives and the context is open.

    The kernel frees the lock when the owner dies, however it dies, so no stale lock needs a person.
    """

    def __init__(self, path: Path, *, what: str) -> None:
        self.path = path
        self.what = what
        self._file: int | None = None

    def __enter__(self) -> Lease:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "an owner that left no name"
            os.close(descriptor)
            raise LeaseHeld(f"{self.what} is held by {owner}; wait for it to end, or end it") from None
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        self._file = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
