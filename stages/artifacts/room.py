"""A full disk in one sentence: whichever library met it and however it said so. Writes nothing."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.artifacts.errors import RatchetError, StoreFull

_CODES = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# torch.save says "unexpected pos 640 vs 534" and safetensors "No space left on device (os error 28)".
_SAID = re.compile(
    r"os error (?:28|27|122)\b|No space left on device|File too large|Disk quota exceeded"
    r"|unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing"
)


@contextmanager
def room_for(path: Path, *, needed: int | None = None) -> Iterator[None]:
    """Raise StoreFull where writing at or below `path` fails for want of room. needed: bytes, where they are known."""
    try:
        yield
    except RatchetError:
        raise
    except Exception as error:
        found = _behind(error)
        if found is None:
            raise
        raise StoreFull(_sentence(path, found, needed)) from error


def _behind(error: BaseException | None) -> BaseException | None:
    """The error in the chain that speaks of a full disk, if there is one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _CODES:
            return error
        if not isinstance(error, OSError) and _SAID.search(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


def _sentence(path: Path, error: BaseException, needed: int | None) -> str:
    """Where, how much was needed, how much there is, and what to do."""
    where = Path(getattr(error, "filename", None) or path)
    there = next((p for p in (where.absolute(), *where.absolute().parents) if p.exists()), Path("/"))
    status = os.statvfs(there)
    room = f"{status.f_bavail * status.f_frsize} bytes and {status.f_favail} files"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        room += f", and no file over {limit} bytes (ulimit -f)"
    wanted = "room to write" if needed is None else f"room for {needed} bytes"
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error).splitlines()[0]
    return (
        f"{where}: expected {wanted}, found {room} free there ({reason}); free space or raise the limit, "
        "then run the same command again: what was finished is kept"
    )
