"""A command that is run with an eye on its whole process tree: when it started, how long it took, its memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from stages.process import ChildProcess

_SAMPLE_SECONDS, _SAMPLE_SHARE = 0.5, 0.02
_TAIL_CHARACTERS = 3000
_GRACE_SECONDS = 30.0
_IN_DIRECTORY = ("/bin/sh", "-c", 'cd "$0" && exec "$@"')
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


@dataclass
class Watched:
    """What a command came to. Times are seconds since the epoch, sizes bytes.

    peak_pss_bytes: the largest sum of proportional set sizes over the tree (shared pages counted once), with what
    was added to shared memory beside it, mapped or not. peak_rss_bytes: the same sum of resident set sizes.
    series: (time, resident set size of the first process alone, proportional set sizes of the tree).
    """

    started_at: float
    seconds: float = 0.0
    peak_pss_bytes: int = 0
    peak_rss_bytes: int = 0
    most_processes: int = 0
    series: list[tuple[float, int, int]] = field(default_factory=list)


def run_watched(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> Watched:
    """Run `command` to its end, its output in `log`. Raises SystemExit with the log's tail if it fails.

    It ends with this process, however this one ends.
    """
    stop = Event()
    before = _shared_memory_used()
    watched = Watched(started_at=time.time())
    child = ChildProcess([*_IN_DIRECTORY, str(cwd), *command], env=env, log=log)
    watcher = Thread(target=_watch, args=(child.pid, before, watched, stop), daemon=True)
    watcher.start()
    try:
        code = child.process.wait()
    finally:
        stop.set()
        child.close(grace_seconds=_GRACE_SECONDS)
        watcher.join()
    watched.seconds = time.time() - watched.started_at
    if code != 0:
        raise SystemExit(f"{' '.join(command)}\nended with {code}; {log} ends:\n{log.read_text()[-_TAIL_CHARACTERS:]}")
    return watched


def _watch(root: int, shared_before: int, watched: Watched, stop: Event) -> None:
    """Sample twice a second, or so seldom that looking costs no more than a fiftieth of one core."""
    cost = 0.0
    while not stop.wait(max(_SAMPLE_SECONDS, cost / _SAMPLE_SHARE)):
        began = time.thread_time()
        sample(root, shared_before, watched)
        cost = time.thread_time() - began


def sample(root: int, shared_before: int, watched: Watched) -> None:
    """Look once at the whole tree. shared_before: bytes in shared memory before it was started."""
    pss = rss = mapped = launcher = 0
    pids = tree(root)
    for pid in pids:
        memory = memory_of(pid)
        pss, rss, mapped = pss + memory.pss, rss + memory.rss, mapped + memory.shared
        if pid == root:
            launcher = memory.rss
    unmapped = max(0, _shared_memory_used() - shared_before - mapped)
    watched.series.append((time.time(), launcher, pss + unmapped))
    watched.peak_pss_bytes = max(watched.peak_pss_bytes, pss + unmapped)
    watched.peak_rss_bytes = max(watched.peak_rss_bytes, rss)
    watched.most_processes = max(watched.most_processes, len(pids))


def tree(root: int) -> list[int]:
    """`root` and every living descendant, by parent ids. A descendant whose parent has ended is not found."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # the second field is the name in brackets, which may hold anything
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
    found = {root} if root in parents else set()
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return sorted(found)


@dataclass(frozen=True)
class Memory:
    """Of one process, bytes. pss: proportional set size. rss: resident set size. shared: the part of pss in shmem."""

    pss: int = 0
    rss: int = 0
    shared: int = 0


def memory_of(pid: int) -> Memory:
    """The memory of a process as the kernel sums it up; zeros if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return Memory()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines) if "kB" in rest}
    return Memory(pss=sizes.get("Pss", 0), rss=sizes.get("Rss", 0), shared=sizes.get("Pss_Shmem", 0))


def _shared_memory_used() -> int:
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0
    return (status.f_blocks - status.f_bfree) * status.f_frsize
