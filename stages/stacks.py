"""What the processes of a worker are doing: asked of them, and of the kernel, before they are killed.

Works with the interpreter lock held, because faulthandler writes from the signal handler itself.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_SIGNAL = signal.SIGUSR1
_WAIT_SECONDS = 2.0
_STOPPED = {"T": "stopped (SIGSTOP)", "t": "stopped (by a debugger)"}


@dataclass(frozen=True)
class Suspect:
    """A worker that may hang. stacks: the file that it writes its stacks to."""

    rank: int
    pid: int
    stacks: Path


def write_stacks_on_signal(path: Path) -> None:
    """From now on SIGUSR1 makes this process append the stacks of all its threads to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(_SIGNAL, file=path.open("a"), all_threads=True)


def save_stacks(suspects: Sequence[Suspect], *, logs: Path, kind: str, why: str) -> Path:
    """Write what every process of `suspects` does to a new file in `logs`; takes two seconds at most."""
    before = {s.pid: _size(s.stacks) for s in suspects}
    asked = [s for s in suspects if _can_answer(s.pid)]
    for suspect in asked:
        os.kill(suspect.pid, _SIGNAL)
    _wait_for(asked, before)
    now = datetime.now(UTC)
    lines = [f"{kind}: {why}", f"what its processes did at {now:%Y-%m-%d %H:%M:%S} UTC", ""]
    for suspect in suspects:
        lines.append(f"rank {suspect.rank}")
        lines += [f"  {_described(pid)}" for pid in family(suspect.pid)]
        lines += [_stacks(suspect, before[suspect.pid], asked=suspect in asked), ""]
    path = logs / f"hang-{now:%Y%m%dT%H%M%S.%f}-{kind}.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def family(pid: int) -> list[int]:
    """`pid`, the processes of its group, and all their descendants."""
    parents: dict[int, int] = {}
    found = [pid]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            parents[int(entry.name)] = int(stat[1])
            if int(stat[2]) == pid and int(entry.name) != pid:
                found.append(int(entry.name))
    for known in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == known and child not in found]
    return found


def _stat(pid: int) -> list[str]:
    """State, parent, process group and what follows of /proc/<pid>/stat; nothing if the process is gone."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
    except OSError:
        return ""


def _state(pid: int) -> str:
    stat = _stat(pid)
    return stat[0] if stat else "gone"


def _can_answer(pid: int) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise, and runs."""
    caught = next((line.split()[1] for line in _read(pid, "status").splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1) and _state(pid) not in _STOPPED


def _wait_for(asked: Sequence[Suspect], before: dict[int, int]) -> None:
    """Until every file has grown and has stopped to grow, or the time is up."""
    deadline, sizes = time.monotonic() + _WAIT_SECONDS, [-1] * len(asked)
    while time.monotonic() < deadline:
        last, sizes = sizes, [_size(s.stacks) for s in asked]
        if sizes == last and all(size > before[s.pid] for s, size in zip(asked, sizes, strict=True)):
            return
        time.sleep(0.1)


def _described(pid: int) -> str:
    state = _state(pid)
    command = _read(pid, "cmdline").replace("\0", " ").strip()
    where = _read(pid, "wchan") or "unknown"
    return f"pid {pid}: state {_STOPPED.get(state, state)}, waits in {where}, {_read(pid, 'comm')}: {command[:300]}"


def _stacks(suspect: Suspect, start: int, *, asked: bool) -> str:
    """What the worker wrote, or why it wrote nothing."""
    if not asked:
        state = _state(suspect.pid)
        reason = f"it is {_STOPPED[state]}" if state in _STOPPED else "it is gone or has not come that far"
        return f"  no stacks: {reason}"
    with suspect.stacks.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace") or f"  no stacks: no answer within {_WAIT_SECONDS:.0f} s"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
