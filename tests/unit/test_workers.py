"""Worker pools: every way in which a worker can fail has its own error, and none outlives its flow.

The workers are real processes that serve real pipes; only the stages are toys.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages import worker
from stages.artifacts.errors import (
    DamagedArtifact,
    GateError,
    InputError,
    RatchetError,
    SourceUnavailable,
    TransientError,
)
from stages.workers import PoolSpec, WorkerPool

# A worker that speaks the protocol of stages.program; what it does is what the order's `job` says.
WORKER = """
import fcntl, json, os, re, signal, subprocess, sys, time
from pathlib import Path
from stages.artifacts.errors import DamagedArtifact, GateError, InputError, RatchetError, SourceUnavailable
from stages.artifacts.errors import TransientError
import stages.program as program

def execute(words, context):
    rank, (what, *rest) = context.rank, words.split()
    match what:
        case "add":
            for index in range(3):
                context.progress("numbers", index + 1, 3)
            return {"pid": float(os.getpid()), "sum": float(sum(map(int, rest))), "ranks": float(context.world_size)}
        case "exit" if rank == int(rest[1]):
            os._exit(int(rest[0]))
        case "kill" if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(60)
        case "gil":
            re.match("(a+)+$", "a" * 60 + "b")
        case "lock":
            fcntl.flock(open(rest[0], "w"), fcntl.LOCK_EX)
        case "join" if rank == 1:
            while not os.path.exists(rest[0]):
                time.sleep(0.05)
        case "join":
            time.sleep(0.2)
        case "slow":
            for index in range(8):
                time.sleep(0.25)
                context.progress("steps", index + 1, 8)
        case "child":
            child = subprocess.Popen(["sleep", "60"])
            context.progress(f"child {child.pid}", 0, 1)
            time.sleep(60)
        case "heir":
            if os.fork() == 0:
                time.sleep(60)
            os._exit(7)
        case "input":
            raise InputError("a bad row")
        case "gate":
            raise GateError("not finite")
        case "transient":
            raise TransientError("the server went away")
        case "unavailable":
            raise SourceUnavailable("the reward server stays away")
        case "damaged":
            raise DamagedArtifact("one file", stage="toy", fingerprint="abc")
        case "ratchet":
            raise RatchetError("something else")
        case "bug":
            raise KeyError("oops")
        case path if path.endswith(".json"):  # of a run: what it does is in its name
            with (context.out / "shards").open("a") as file:
                file.write(f"{context.shard.index} {context.shard.sha256} {context.shard.places[0].name}\\n")
            if context.shard.index == 1 and path.endswith("lost.json"):
                os._exit(3)
            if context.shard.index == 1 and path.endswith("away.json"):
                raise SourceUnavailable("the reward server stays away")
            if context.shard.index == 1 and path.endswith("refused.json"):
                raise GateError("not finite")
    return {}

program.write_stacks_on_signal(Path(sys.argv[2]))
program.load_job = lambda path: str(path).removeprefix("/")
program.execute = execute
with os.fdopen(int(sys.argv[1]), "w") as replies:
    program.serve(replies, warm="json")
"""


def toy_command(argv: list[str]) -> list[str]:
    """What starts the toy program in the place of `argv`, with the same files."""
    given = [argv[argv.index(name) + 1] for name in ("--replies", "--stacks")]
    return [sys.executable, "-c", WORKER, *given]


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the toy program in the place of `python -m stages.program`."""
    real = worker.ChildProcess

    def start(argv: list[str], **more: object) -> worker.ChildProcess:
        return real(toy_command(argv), **more)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "ChildProcess", start)


@pytest.fixture
def open_pool(toys: None, tmp_path: Path) -> Iterator[Callable[..., WorkerPool]]:
    opened: list[WorkerPool] = []

    def start(ranks: int = 1, stall_seconds: float = 30.0) -> WorkerPool:
        opened.append(WorkerPool(PoolSpec("trainer", "cpu", ranks, 1), logs=tmp_path, stall_seconds=stall_seconds))
        return opened[-1]

    yield start
    for pool in opened:
        pool.kill()


def run(pool: WorkerPool, words: str, *, seen: list[tuple[str, int, int]] | None = None) -> dict[str, float]:
    def note(what: str, done: int, total: int) -> None:
        if seen is not None:
            seen.append((what, done, total))

    return pool.run(Path(f"/{words}"), Path("/out"), on_progress=note)


def test_whoever_may_not_go_on_once_the_workers_are_ready_gives_them_nothing(
    open_pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, orders, states = open_pool(), [], []
    monkeypatch.setattr(worker.WorkerProcess, "send", lambda self, order: orders.append(order))

    def refuse() -> None:
        states.append(pool._ready)
        raise GateError("taken over")

    with pytest.raises(GateError, match="taken over"):
        pool.run(Path("/add 1"), Path("/out"), on_progress=ignored, before=refuse)
    assert states == [True] and orders == [] and not pool.is_started


def ignored(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], *, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_pool_stays_alive_between_jobs_and_reports_progress_of_rank_0(open_pool: Callable[..., WorkerPool]) -> None:
    pool, seen = open_pool(ranks=2), []  # type: ignore[var-annotated]
    first, second = run(pool, "add 1 2", seen=seen), run(pool, "add 5")
    assert (first["sum"], second["sum"], first["ranks"]) == (3.0, 5.0, 2.0)
    assert first["pid"] == second["pid"]
    assert seen == [("numbers", 1, 3), ("numbers", 2, 3), ("numbers", 3, 3)]
    assert pool.start_seconds > 0
    pool.close()
    assert not pool.is_started and not is_alive(int(first["pid"]))


ERRORS = {
    "input": (InputError, "^a bad row$"),
    "gate": (GateError, "^not finite$"),
    "transient": (TransientError, "^the server went away$"),
    "unavailable": (SourceUnavailable, "^the reward server stays away$"),
    "damaged": (DamagedArtifact, "^one file$"),
    "ratchet": (RatchetError, "something else; log: .*trainer-0.log"),
    "bug": (RatchetError, "KeyError: 'oops'; log: .*trainer-0.log"),
    "exit 3 0": (TransientError, r"worker rank 0 \(pid \d+\) ended with exit code 3; log: "),
    "kill": (TransientError, "ended with signal 9"),
}


@pytest.mark.parametrize("words", ERRORS)
def test_each_failure_has_its_error_and_the_next_job_runs(open_pool: Callable[..., WorkerPool], words: str) -> None:
    pool = open_pool()
    kind, message = ERRORS[words]
    with pytest.raises(kind, match=message) as caught:
        run(pool, words)
    assert type(caught.value) is kind
    if isinstance(caught.value, DamagedArtifact):
        assert (caught.value.stage, caught.value.fingerprint) == ("toy", "abc")
    assert not pool.is_started
    assert run(pool, "add 4")["sum"] == 4.0


def test_a_bug_leaves_its_traceback_in_the_log(open_pool: Callable[..., WorkerPool], tmp_path: Path) -> None:
    with pytest.raises(RatchetError):
        run(open_pool(), "bug")
    assert "Traceback" in (tmp_path / "trainer-0.log").read_text()


def test_one_lost_rank_takes_the_others_with_it(open_pool: Callable[..., WorkerPool]) -> None:
    pool = open_pool(ranks=2)
    run(pool, "add 1")
    pids = [worker.child.pid for worker in pool._workers]
    with pytest.raises(TransientError, match=r"worker rank 1 .* exit code 5"):
        run(pool, "exit 5 1")
    assert not any(is_alive(pid) for pid in pids)


def test_silence_counts_as_lost_and_progress_does_not(open_pool: Callable[..., WorkerPool]) -> None:
    pool = open_pool(stall_seconds=1.0)
    assert run(pool, "slow") == {}
    (worker,) = pool._workers
    started = time.monotonic()
    with pytest.raises(TransientError, match=r"rank \[0\]: expected progress within 1 s, found none; .*; log: "):
        run(pool, "hang")
    assert time.monotonic() - started < 5.0
    assert not is_alive(worker.child.pid)


def test_a_stopped_process_is_lost_too(open_pool: Callable[..., WorkerPool]) -> None:
    pool = open_pool(stall_seconds=1.0)
    run(pool, "add 1")
    (worker,) = pool._workers
    os.kill(worker.child.pid, signal.SIGSTOP)
    with pytest.raises(TransientError, match="expected progress"):
        run(pool, "add 1")
    assert not is_alive(worker.child.pid)


def test_a_worker_that_died_between_jobs(open_pool: Callable[..., WorkerPool]) -> None:
    pool = open_pool()
    pid = int(run(pool, "add 1")["pid"])
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid))
    with pytest.raises(TransientError, match="ended with signal 9"):
        run(pool, "add 1")
    assert run(pool, "add 6")["sum"] == 6.0


def test_a_pool_at_rest_lives_on_and_one_that_cannot_rest_is_ended(
    open_pool: Callable[..., WorkerPool],
) -> None:
    """What a killed pool held on its device is gone as well, which is all that was asked."""
    pool = open_pool()
    pool.rest(on_progress=ignored)
    assert not pool.is_started  # nobody is there who would have to leave
    pid = run(pool, "add 1")["pid"]
    pool.rest(on_progress=ignored)
    pool.rest(on_progress=ignored)
    assert run(pool, "add 2")["pid"] == pid
    os.kill(int(pid), signal.SIGKILL)
    assert wait_until(lambda: not is_alive(int(pid)))
    pool.rest(on_progress=ignored)
    assert not pool.is_started
    assert run(pool, "add 3")["sum"] == 3.0


PARENT = """
import json, sys
from pathlib import Path
import tests.unit.test_workers as here
from stages import worker, workers
real = worker.ChildProcess
worker.ChildProcess = lambda argv, **more: real(here.toy_command(argv), **more)
pool = workers.WorkerPool(workers.PoolSpec("trainer", "cpu", 2, 1), logs=Path(sys.argv[1]))
def show(what, done, total):
    print(json.dumps([int(what.split()[1]), *(w.child.pid for w in pool._workers)]), flush=True)
pool.run(Path("/child"), Path("/out"), on_progress=show)
"""


def test_no_process_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    """kill -9 of the flow's process: the workers and what they started are gone within seconds."""
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 3 and all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids)), [pid for pid in pids if is_alive(pid)]


def test_threads_look_for_work_only_where_nobody_waits_for_their_core() -> None:
    cores = len(os.sched_getaffinity(0))
    assert PoolSpec("trainer", "cpu", 1, cores).spin_count == "10000"
    assert PoolSpec("trainer", "cpu", 2, cores).spin_count == "0"
    assert PoolSpec("trainer", "cpu", 1, cores, works_beside=True).spin_count == "0"
