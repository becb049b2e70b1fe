"""Work beside the flow: its place in the outcomes, and how each of the two ends the other.

The workers are real processes that serve real pipes; only the stages are toys.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.load import load_config
from stages import worker
from stages.artifacts.errors import DamagedArtifact, GateError, TransientError, WorkersLost
from stages.artifacts.reference import ArtifactRef
from tasks.beside import beside
from tasks.display import Lines
from tasks.launch import stage_task
from tasks.run import Costs, NotDone, Outcome, Run, Unwanted
from tests.unit.test_workers import toy_command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    real = worker.ChildProcess
    monkeypatch.setattr(worker, "ChildProcess", lambda argv, **more: real(toy_command(argv), **more))
    config = load_config("configs/quickstart.yaml", overrides={"store": str(tmp_path / "store")})
    with Run(config, display=Lines()) as run:
        yield run


def outcome(run: Run, label: str) -> Outcome:
    ref = ArtifactRef(stage="toy", fingerprint="0" * 32)
    made = Outcome(label=label, ref=ref, metrics={}, seconds=1.0, reused=False, path=run.store, costs=Costs(1.0))
    run.outcomes.append(made)
    return made


def hang(run: Run, pids: Future[list[int]]) -> Outcome:
    """A generator that shows no progress for a minute."""
    pool = run.pool(run.generator_spec())
    pool.start()
    pids.set_result([worker.child.pid for worker in pool._workers])
    pool.run(Path("/hang"), run.directory, on_progress=lambda *said: None)
    return outcome(run, "never")


@pytest.mark.parametrize("slower", ["flow", "beside it"])
def test_its_outcomes_follow_the_flows_whoever_is_slower(run: Run, slower: str) -> None:
    def make(side: Run) -> Outcome:
        if slower == "beside it":
            time.sleep(0.2)
        return outcome(side, "round-001-generate_rollouts")

    with beside(run, make) as made:
        if slower == "flow":
            made.result()
        outcome(run, "round-000-update_policy")
    assert [o.label for o in run.outcomes] == ["round-000-update_policy", "round-001-generate_rollouts"]
    assert made.result() is run.outcomes[1] and run.beside_it is None


def test_a_replay_looks_up_one_after_the_other(tmp_path: Path) -> None:
    config = load_config("configs/quickstart.yaml", overrides={"store": str(tmp_path / "store")})
    threads = []

    def make(side: Run) -> Outcome:
        threads.append(threading.current_thread())
        return outcome(side, "round-001-generate_rollouts")

    def lack(side: Run) -> Outcome:
        raise NotDone("round-001-generate_rollouts")

    with Run(config, display=Lines(), replay=True) as run:
        with beside(run, make):
            outcome(run, "round-000-update_policy")
        assert [o.label for o in run.outcomes] == ["round-000-update_policy", "round-001-generate_rollouts"]
        with pytest.raises(NotDone), beside(run, lack):
            pass
    assert threads == [threading.main_thread()]


@pytest.mark.parametrize("error", [NotDone("x"), DamagedArtifact("x", stage="toy", fingerprint="0" * 32)])
def test_a_replay_that_finds_the_flow_itself_undone_waits_for_nothing(tmp_path: Path, error: Exception) -> None:
    config = load_config("configs/quickstart.yaml", overrides={"store": str(tmp_path / "store")})
    started = time.monotonic()
    with Run(config, display=Lines(), replay=True) as run:
        with pytest.raises(type(error)), beside(run, lambda side: outcome(side, "never")):
            raise error
        assert run.outcomes == []
    assert time.monotonic() - started < 1.0


def test_what_fails_beside_the_flow_ends_it_at_its_next_stage(run: Run) -> None:
    tries = []

    @stage_task
    def next_stage(run: Run, *, label: str) -> Outcome:
        tries.append(label)
        run.require_going_on()
        return outcome(run, label)

    def make(side: Run) -> Outcome:
        raise WorkersLost("round-001-generate_rollouts: attempt 3 of 3 lost")

    def body() -> None:
        with beside(run, make) as made:
            assert isinstance(made.exception(), WorkersLost)
            next_stage(run, label="round-000-update_policy")

    with pytest.raises(WorkersLost, match="attempt 3 of 3 lost"):
        body()
    assert tries == ["round-000-update_policy"], "its attempts are used up already"
    assert run.display.lines == [  # type: ignore[attr-defined]
        "round-001-generate_rollouts: attempt 3 of 3 lost; the run ends after the stage that is under way"
    ]
    assert run.outcomes == []


def test_a_failure_beside_the_last_stage_is_not_lost(run: Run) -> None:
    def make(side: Run) -> Outcome:
        raise GateError("rewards are not finite")

    with pytest.raises(GateError, match="rewards are not finite"), beside(run, make):
        pass


@pytest.mark.parametrize("error", [GateError("loss is nan"), DamagedArtifact("a file", stage="toy", fingerprint="a")])
def test_a_flow_that_fails_ends_what_is_beside_it(run: Run, error: Exception) -> None:
    pids: Future[list[int]] = Future()
    started = time.monotonic()
    with pytest.raises(type(error)), beside(run, lambda side: hang(side, pids)) as made:
        assert all(psutil.pid_exists(pid) for pid in pids.result(timeout=30.0))
        raise error
    assert time.monotonic() - started < 30.0
    assert isinstance(made.exception(timeout=0), TransientError)
    assert not any(psutil.pid_exists(pid) for pid in pids.result()), "ended, and nobody waits for it"
    again = run.pool(run.generator_spec()).run(Path("/add 1 2"), run.directory, on_progress=lambda *said: None)
    assert again["sum"] == 3.0, "a damaged artifact is made again with the same pools"


def test_a_lost_worker_is_not_tried_again_once_nobody_waits(run: Run) -> None:
    pids: Future[list[int]] = Future()
    tries = []

    @stage_task
    def sample(run: Run, *, label: str) -> Outcome:
        tries.append(label)
        return hang(run, pids)

    with pytest.raises(GateError), beside(run, lambda side: sample(side, label="round-001-sample")) as made:
        pids.result(timeout=30.0)
        raise GateError("loss is nan")
    assert isinstance(made.exception(timeout=0), Unwanted) and tries == ["round-001-sample"]
    assert run.display.lines == []  # type: ignore[attr-defined]


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Also where the suite itself was started in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("waiting", ["in a stage", "for what is beside it"])
def test_an_interrupt_ends_both_within_seconds(run: Run, heeds_interrupts: None, waiting: str) -> None:
    pids: Future[list[int]] = Future()

    def interrupt() -> None:
        pids.result(timeout=30.0)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    def body() -> Any:
        with beside(run, lambda side: hang(side, pids)) as made:
            threading.Thread(target=interrupt).start()
            if waiting == "in a stage":
                time.sleep(60.0)
        return made

    with pytest.raises(KeyboardInterrupt):
        body()
    interrupted = time.monotonic()
    assert not any(psutil.pid_exists(pid) for pid in pids.result())
    assert time.monotonic() - interrupted < 5.0
