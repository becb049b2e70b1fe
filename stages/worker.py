"""One resident worker as its owner sees it: a process, the pipe for its orders and the pipe for its replies."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.artifacts.errors import (
    DamagedArtifact,
    GateError,
    InputError,
    RatchetError,
    ReleasedArtifact,
    SourceUnavailable,
    StoreFull,
    TransientError,
)
from stages.process import ChildProcess

_ERRORS: dict[str, type[RatchetError]] = {
    error.kind: error for error in (InputError, GateError, SourceUnavailable, StoreFull, TransientError)
}
_ARTIFACT_ERRORS = {error.kind: error for error in (DamagedArtifact, ReleasedArtifact)}


class WorkerProcess:
    """One process and its two pipes."""

    def __init__(self, rank: int, *, env: dict[str, str], log: Path, arguments: Sequence[str]) -> None:
        self.rank = rank
        self.log = log
        self.stacks = log.with_suffix(".stacks.txt")
        self.replies, write_end = os.pipe()
        argv = [sys.executable, "-m", "stages.program", "--replies", str(write_end), "--stacks", str(self.stacks)]
        try:
            self.child = ChildProcess([*argv, *arguments], env=env, log=log, reply_descriptor=write_end)
        except BaseException:
            os.close(self.replies)
            raise
        finally:
            os.close(write_end)
        self._buffer = b""

    def send(self, order: dict[str, Any]) -> None:
        """Give it a line. Raises TransientError if nobody reads any more."""
        assert self.child.process.stdin is not None
        try:
            self.child.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.child.process.stdin.flush()
        except BrokenPipeError:
            raise self._lost() from None

    def read(self) -> list[dict[str, Any]]:
        """The whole lines that have arrived. Raises TransientError at end-of-file: the process is gone."""
        data = os.read(self.replies, 65536)
        if not data:
            raise self._lost()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def require_alive(self) -> None:
        """Raise TransientError if the process has ended and all it said is read.

        End-of-file alone does not tell: what the worker started may hold the pipe open.
        """
        if self.child.process.poll() is not None and not select.select([self.replies], [], [], 0)[0]:
            raise self._lost()

    def close(self) -> None:
        """Let go of the pipe of a process that has ended."""
        os.close(self.replies)

    def _lost(self) -> TransientError:
        self.child.kill()
        code = self.child.process.poll()
        how = "no exit code" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return TransientError(f"worker rank {self.rank} (pid {self.child.pid}) ended with {how}; log: {self.log}")


def reported_error(message: dict[str, Any], *, log: Path) -> RatchetError:
    """The error that a stage reported, as the class it was raised with."""
    kind, text = message["error"], message["message"]
    if kind in _ARTIFACT_ERRORS:
        stage, fingerprint = message["artifact"]
        return _ARTIFACT_ERRORS[kind](text, stage=stage, fingerprint=fingerprint)
    if kind in _ERRORS:
        return _ERRORS[kind](text)
    return RatchetError(f"{text}; log: {log}")
