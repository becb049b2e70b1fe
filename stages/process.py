"""Child processes that never outlive their parent. Knows nothing of stages, jobs or Prefect."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# The child waits for a line before it becomes the program: until then nobody watches over it, and if this process
# dies that early the line never comes.
_GATE = ("/bin/sh", "-c", 'read -r line || exit 0; exec "$@"', "sh")
_REAP_SECONDS = 20.0


class ChildProcess:
    """A process in a session of its own, tied to this one by a lifeline.

    The lifeline is a pipe into a small watcher: when this process ends, however it ends, the pipe reads
    end-of-file and the watcher kills the child's whole process group. It needs no cooperation from the child,
    so it also ends one that hangs with the interpreter lock held.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, reply_descriptor: int | None = None
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*_GATE, *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(env),
                pass_fds=() if reply_descriptor is None else (reply_descriptor,),
                start_new_session=True,
            )
        read_end, self._lifeline = os.pipe()
        os.set_inheritable(self._lifeline, False)
        # No "--" before the group: dash, which is /bin/sh on Debian and Ubuntu, does not take it.
        watch = f"read line; kill -KILL -{self.process.pid} 2>/dev/null"
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", watch],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id, which is also the process group's."""
        return self.process.pid

    def close(self, *, grace_seconds: float) -> None:
        """Ask the child to end (SIGTERM), wait `grace_seconds`, then kill its whole group."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=grace_seconds)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def signal_kill(self) -> None:
        """Send SIGKILL to the child's whole process group and wait for nothing."""
        if self._lifeline >= 0:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the child's process group now and dismiss the watcher. Again does nothing: the ids may be others'."""
        if self._lifeline < 0:
            return
        self.signal_kill()
        # One that the kernel holds (a dead network disk, a driver) dies when it is let go; nobody waits for that.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_REAP_SECONDS)
        self._watcher.kill()
        self._watcher.wait()
        os.close(self._lifeline)
        self._lifeline = -1
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
