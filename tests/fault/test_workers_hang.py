"""R11 with toy workers: every way to hang is noticed, its stacks are kept, and it is replaced, three times at most."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import prefect
import psutil
import pytest

from configs.load import load_config
from flows.server import prefect_server
from stages import worker, workers
from stages.artifacts.errors import RatchetError, TransientError
from stages.artifacts.store import verify
from stages.job import Job
from stages.workers import PoolSpec, WorkerPool
from tasks import launch
from tasks.display import Lines, hide_expected_tracebacks
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run
from tests.integration.pipelines import TINY_GRPO
from tests.unit.test_workers import run, toy_command

TORTURE = os.environ.get("RATCHET_TORTURE") == "1"
LIMIT = 5.0 if TORTURE else 1.0

# What hangs: ranks, what the toys do, which rank gets a SIGSTOP, which ranks are silent, words of the saved file.
HANGS: dict[str, tuple[int, str, int | None, list[int], list[str]]] = {
    "asleep": (1, "hang", None, [0], ["in execute", "in serve"]),
    "interpreter lock held": (1, "gil", None, [0], ["re/__init__.py", "in execute"]),
    "lock held by another": (1, "lock {path}", None, [0], ["in execute"]),
    "collective never joined": (2, "join {path}.never", None, [1], ["rank 0", "rank 1", "in execute"]),
    "stopped": (1, "slow", 0, [0], ["stopped (SIGSTOP)"]),
    "one of two stopped": (2, "slow", 1, [1], ["stopped (SIGSTOP)", "in serve"]),
}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker.ChildProcess
    monkeypatch.setattr(worker, "ChildProcess", lambda argv, **more: real(toy_command(argv), **more))


def open_files() -> int:
    return psutil.Process().num_fds()


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_noticed_written_down_and_replaced(toys: None, tmp_path: Path, name: str) -> None:
    ranks, words, stop, silent, expected = HANGS[name]
    trials, slowest = 5 if TORTURE else 1, 0.0
    path = tmp_path / "lock"
    with path.open("w") as held, WorkerPool(PoolSpec("trainer", "cpu", ranks, 1), logs=tmp_path) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        pool.stall_seconds = LIMIT
        for _ in range(trials):
            run(pool, "add 1")
            pids = [worker.child.pid for worker in pool._workers]
            if stop is not None:
                os.kill(pids[stop], signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(TransientError) as caught:
                run(pool, words.format(path=path))
            slowest = max(slowest, time.monotonic() - started)
            message = str(caught.value)
            assert message.startswith(f"trainer worker rank {silent}: expected progress within {LIMIT:g} s, found none")
            saved = Path(message.partition("what its processes did: ")[2].partition(";")[0])
            text = saved.read_text()
            assert saved.name.startswith("hang-") and saved.name.endswith("-trainer.txt")
            assert all(word in text for word in expected), text
            assert all(f"pid {pid}: state " in text for pid in pids), text
            assert not any(psutil.pid_exists(pid) for pid in pids)
        assert run(pool, "add 4")["sum"] == 4.0
    assert slowest < LIMIT + 5.0
    print(f"R11: {name}: {trials} of {trials} noticed, kept and replaced, the slowest after {slowest:.1f} s")


def test_an_engine_that_hangs_is_noticed_while_another_works(toys: None, tmp_path: Path) -> None:
    """Engines do not wait for one another, so the progress of one says nothing of the other."""
    spec = PoolSpec("generator", "cpu", 2, 1)
    with WorkerPool(spec, logs=tmp_path, stall_seconds=1.0) as pool:
        run(pool, "add 1")
        os.kill(pool._workers[1].child.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TransientError, match=r"generator worker rank \[1\]"):
            run(pool, "slow")
        assert time.monotonic() - started < 6.0


def test_a_hang_before_the_first_job_is_noticed_too(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "START_SECONDS", 0.5)
    with WorkerPool(PoolSpec("trainer", "cpu", 1, 1), logs=tmp_path) as pool:
        pool.start()
        os.kill(pool._workers[0].child.pid, signal.SIGSTOP)
        with pytest.raises(TransientError, match=r"expected progress within 0.5 s, found none; what its processes"):
            run(pool, "add 1")


def test_a_death_is_noticed_though_a_child_holds_the_pipe(toys: None, tmp_path: Path) -> None:
    with WorkerPool(PoolSpec("generator", "cpu", 1, 1), logs=tmp_path) as pool:
        started = time.monotonic()
        with pytest.raises(TransientError, match="ended with exit code 7"):
            run(pool, "heir")
        assert time.monotonic() - started < 10.0


def test_jobs_and_pools_leak_no_descriptor(toys: None, tmp_path: Path) -> None:
    jobs, pools = (3000, 60) if TORTURE else (300, 4)
    others = psutil.Process().children()  # pools that other tests share
    with WorkerPool(PoolSpec("trainer", "cpu", 1, 1), logs=tmp_path, stall_seconds=30.0) as pool:
        run(pool, "add 1")
        before, resident = open_files(), psutil.Process().memory_info().rss
        for _ in range(jobs):
            run(pool, "add 1")
        after, grown = open_files(), psutil.Process().memory_info().rss / resident - 1
        pool.kill()
        closed = open_files()
        for _ in range(pools):
            with pytest.raises(TransientError):
                run(pool, "exit 3 0")
        assert open_files() == closed and psutil.Process().children() == others
    assert after == before and grown < 0.05
    print(f"workers: {jobs} jobs and {pools} lost pools, {after - before} descriptors more, memory {grown:+.1%}")


# Three attempts


class ToyJob(Job):
    STAGE: ClassVar[str] = "toy"
    VERSION: ClassVar[int] = 1


class Scripted(WorkerPool):
    """Runs what the script says instead of the job, one word after another, the last for ever."""

    script: ClassVar[list[str]] = []

    def run(self, job: Path, out: Path, **more: Any) -> dict[str, float]:
        words = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        (out / "numbers").write_text("1")
        return super().run(Path(f"/{words}"), out, **more)


@stage_task
def toy(run: Run, *, round_index: int) -> Outcome:
    return complete(run, ToyJob(store=run.store, seed=round_index), label=f"round-{round_index:03d}-toy")


@pytest.fixture
def opened(toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(launch, "_BACKOFF_SECONDS", 0.05)
    config = load_config(str(TINY_GRPO), overrides={"store": str(tmp_path / "store")})
    with Run(config, display=Lines()) as opened:
        opened._pools[opened.trainer_spec()] = Scripted(opened.trainer_spec(), logs=tmp_path, stall_seconds=1.0)
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    hide_expected_tracebacks()
    with prefect_server(log=tmp_path_factory.mktemp("prefect") / "server.log"):
        yield


def attempted(opened: Run, script: list[str], *, under_prefect: bool) -> tuple[list[str], RatchetError | None]:
    """The lines that the run said, and the error that it ended with."""
    Scripted.script = list(script)

    @prefect.flow(name="toy", persist_result=False)
    def flow() -> None:
        toy(opened, round_index=0)

    try:
        flow() if under_prefect else toy(opened, round_index=0)
    except RatchetError as error:
        return opened.display.lines, error  # type: ignore[attr-defined]
    return opened.display.lines, None  # type: ignore[attr-defined]


@pytest.mark.parametrize("under_prefect", [False, True])
def test_a_worker_lost_again_and_again_is_a_clear_stop(opened: Run, server: None, under_prefect: bool) -> None:
    lines, error = attempted(opened, ["hang"], under_prefect=under_prefect)
    assert error is not None and error.exit_code == 75
    assert len(lines) == 2
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"round-000-toy: attempt {number} of 3 lost: trainer worker rank [0]: expected progress")
        assert line.endswith("; trying again")
    assert str(error).startswith("round-000-toy: attempt 3 of 3 lost, the last: trainer worker rank [0]: expected")
    saved = Path(str(error).partition("what its processes did: ")[2].partition(";")[0])
    assert saved.is_file() and "trainer-0.log" in str(error)
    assert verify(opened.store, ToyJob(store=opened.store, seed=0).ref) is None
    assert len(list((opened.store / "attempts" / "toy").glob("*/0*"))) == 3


@pytest.mark.parametrize("under_prefect", [False, True])
def test_lost_twice_and_made_the_third_time(opened: Run, server: None, under_prefect: bool) -> None:
    lines, error = attempted(opened, ["kill", "exit 3 0", "add 1 2"], under_prefect=under_prefect)
    assert error is None
    assert [line.split(";")[0].partition(" lost: ")[0] for line in lines[:2]] == [
        "round-000-toy: attempt 1 of 3",
        "round-000-toy: attempt 2 of 3",
    ]
    assert "ended with signal 9" in lines[0] and "ended with exit code 3" in lines[1]
    manifest = verify(opened.store, ToyJob(store=opened.store, seed=0).ref)
    assert manifest is not None and manifest.metrics["sum"] == 3.0


@pytest.mark.parametrize("under_prefect", [False, True])
@pytest.mark.parametrize("words", ["input", "gate", "bug", "unavailable"])
def test_other_failures_are_not_tried_again(opened: Run, server: None, words: str, under_prefect: bool) -> None:
    lines, error = attempted(opened, [words], under_prefect=under_prefect)
    assert error is not None and type(error) is not TransientError and lines == []
    assert error.exit_code == {"input": 2, "gate": 3, "bug": 1, "unavailable": 69}[words]
    assert len(list((opened.store / "attempts" / "toy").glob("*/0*"))) == 1
