"""One owner per run directory and per artifact: flock, an owner file, a fencing number. A dead owner's lease is free.

The kernel frees the lock when the owner dies, however it dies, so no stale lock needs a person. An owner that is
stopped, or on a host that nobody reaches, can be taken over from: the number grows, and the old owner, should it wake
up, finds at its next commit that the lease is no longer its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from stages.artifacts.errors import LeaseHeld

_LEAVING_SECONDS = 2.0


@dataclass(frozen=True)
class Owner:
    """Who holds a lease. number: the fencing number, one higher with each owner."""

    host: str
    pid: int
    since: str
    number: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"

    @property
    def is_dead(self) -> bool:
        """Whether it was a process of this host and is none any more."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


class Lease:
    """Exclusive ownership of `path`, for as long as this process lives and the context is open.

    take_over: whether to take it from an owner that holds it still. fenced: who lost it so, if anybody.
    """

    def __init__(self, path: Path, *, what: str, take_over: bool = False) -> None:
        self.path = path
        self.what = what
        self.take_over = take_over
        self.fenced: Owner | None = None
        self._file: int | None = None
        self._mine: Owner | None = None

    def __enter__(self) -> Lease:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _LEAVING_SECONDS
        while self._file is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _read(descriptor)
                os.close(descriptor)
                # Who has the lock may not have written its name yet; and a process that an owner was starting as it
                # died holds the lock with it until its own program begins.
                if (owner is None or owner.is_dead) and time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                self._wrest(owner)
                break
            if not self._is_at_path(descriptor):
                os.close(descriptor)  # taken over between open and flock: look again
                continue
            self._sign(descriptor, after=_read(descriptor))
        return self

    def _wrest(self, owner: Owner | None) -> None:
        """Put a new lease file in the place of the held one. Raises LeaseHeld if that is not allowed."""
        if not self.take_over:
            raise LeaseHeld(
                f"{self.what} is held by {owner or 'an owner that left no name'}; wait for it to end, or end it. If it "
                "is stopped for good, or on a host that cannot be reached, run the flow with --take-over"
            )
        guard = os.open(self.path.with_name(f"{self.path.name}.take-over"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self.path.open("rb") as file:
                now = _read(file.fileno())
            if now != owner:
                raise LeaseHeld(f"{self.what} was taken over by {now} a moment ago")
            fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sign(descriptor, after=owner)
            os.replace(fresh, self.path)
            self.fenced = owner
        except BlockingIOError:
            raise LeaseHeld(f"{self.what} is being taken over by another process") from None
        finally:
            os.close(guard)

    def _sign(self, descriptor: int, *, after: Owner | None) -> None:
        mine = Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            number=after.number + 1 if after else 1,
        )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(mine)).encode(), 0)
        self._file, self._mine = descriptor, mine

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        here = os.fstat(descriptor)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def require(self) -> None:
        """Raise LeaseHeld if somebody has taken the lease over: nothing may be committed under it any more."""
        assert self._file is not None, "the lease is not open"
        if self._is_at_path(self._file) and _read(self._file) == self._mine:
            return
        try:
            with self.path.open("rb") as file:
                owner = _read(file.fileno())
        except FileNotFoundError:
            owner = None
        raise LeaseHeld(
            f"{self.what} was taken over by {owner or 'somebody'} while this process was away; it commits nothing more"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _read(descriptor: int) -> Owner | None:
    """Who is written in a lease file; None if nobody is, or nobody that can be read."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return Owner(
            host=str(found["host"]), pid=int(found["pid"]), since=str(found["since"]), number=int(found["number"])
        )
    except (ValueError, KeyError, TypeError):
        return None
