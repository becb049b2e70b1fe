"""Work on rollouts that are still being sampled: each file once, in order, by workers that may be lost.

The workers are real processes that serve real pipes; only the stages are toys.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest

from configs.load import load_config
from stages import worker
from stages.artifacts import layout, store
from stages.artifacts.errors import GateError, LeaseHeld
from stages.artifacts.lease import Lease
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.seals import seal
from stages.generate_rollouts.job import GenerateRollouts
from tasks.ahead import work_ahead
from tasks.display import Lines
from tasks.generate_rollouts import rollouts_job
from tasks.run import Costs, Outcome, Run
from tests.unit.test_workers import toy_command
from tests.unit.toys import Toy, committed

FILES = 3


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    real = worker.ChildProcess
    monkeypatch.setattr(worker, "ChildProcess", lambda argv, **more: real(toy_command(argv), **more))
    rounds = {"rounds.prompts_per_round": FILES * 2, "rounds.prompts_per_shard": 2}
    config = load_config("configs/quickstart.yaml", overrides={"store": str(tmp_path / "store"), **rounds})
    with Run(config, display=Lines()) as run:
        yield run


@pytest.fixture
def sampling(run: Run) -> GenerateRollouts:
    """A round's rollouts, none of which is there yet."""
    ref = ArtifactRef(stage="toy", fingerprint="0" * 32)
    data = Outcome("data", ref, metrics={}, seconds=1.0, reused=False, path=run.store, costs=Costs(1.0))
    return rollouts_job(
        run,
        data=data,
        policy=ref,
        purpose="training",
        split="train",
        num_prompts=FILES * 2,
        group_size=1,
        round_index=0,
    )


def finish(attempt: Path, index: int) -> None:
    """A file of rollouts is whole."""
    path = layout.shard(attempt, "rollouts", index)
    path.write_bytes(bytes([index]))
    seal(path)


def worked_on(job: Toy) -> list[list[str]]:
    """By attempt, the indices of the files in the order in which they were worked on."""
    attempts = layout.attempts(job.store, job.STAGE, job.fingerprint)
    found = sorted(attempts.glob("*/shards"))
    return [[line.split()[0] for line in path.read_text().splitlines()] for path in found]


def toys(run: Run, *words: str) -> dict[str, Any]:
    return {word: Toy(store=run.store, seed=0, word=word) for word in words}


def test_each_file_is_worked_on_as_it_comes_by_all_jobs(run: Run, sampling: GenerateRollouts) -> None:
    made: Future[None] = Future()

    def sample() -> None:
        attempt = store.new_attempt(sampling)
        for index in (1, 0):  # not in order: engines sample several at once
            time.sleep(0.3)
            finish(attempt, index)
        time.sleep(0.3)
        finish(attempt, 2)
        store.commit(sampling, attempt, metrics={}, wall_seconds=1.0)
        made.set_result(None)

    thread = Thread(target=sample)
    thread.start()
    jobs = toys(run, "first", "second")
    work_ahead(run, sampling, jobs, until=made)
    thread.join()
    assert [worked_on(job) for job in jobs.values()] == [[["0", "1", "2"]]] * 2
    assert run.ahead_seconds.keys() == jobs.keys() and min(run.ahead_seconds.values()) > 0
    for job in jobs.values():  # nobody holds them any more
        with Lease(layout.lock(run.store, job.STAGE, job.fingerprint), what="toy"):
            pass


def test_rollouts_that_are_there_already_are_worked_on_where_they_are(run: Run, sampling: GenerateRollouts) -> None:
    attempt = store.new_attempt(sampling)
    for index in range(FILES):
        finish(attempt, index)
    store.commit(sampling, attempt, metrics={}, wall_seconds=1.0)
    made: Future[None] = Future()
    made.set_result(None)
    jobs = toys(run, "only")
    work_ahead(run, sampling, jobs, until=made)
    assert worked_on(jobs["only"]) == [["0", "1", "2"]]


def test_where_sampling_ends_in_an_error_so_does_the_work(run: Run, sampling: GenerateRollouts) -> None:
    made: Future[None] = Future()
    run.beside_it = made
    finish(store.new_attempt(sampling), 0)
    jobs = toys(run, "only")
    Timer(0.5, made.set_exception, [GateError("a logprob above 0")]).start()
    with pytest.raises(GateError, match="a logprob above 0"):
        work_ahead(run, sampling, jobs, until=made)
    assert worked_on(jobs["only"]) == [["0"]]


def test_a_lost_worker_leaves_the_rest_to_the_stage(run: Run, sampling: GenerateRollouts) -> None:
    attempt = store.new_attempt(sampling)
    for index in range(FILES):
        finish(attempt, index)
    jobs = toys(run, "lost")
    work_ahead(run, sampling, jobs, until=Future())
    assert worked_on(jobs["lost"]) == [["0", "1"]]
    assert isinstance(run.display, Lines) and "worked on ahead" in run.display.lines[-1]
    assert not run.pool(run.trainer_spec()).is_started


def test_what_a_stage_refuses_ends_the_run_at_once(run: Run, sampling: GenerateRollouts) -> None:
    attempt = store.new_attempt(sampling)
    for index in range(FILES):
        finish(attempt, index)
    jobs = toys(run, "refused")
    with pytest.raises(GateError, match="not finite"):
        work_ahead(run, sampling, jobs, until=Future())
    assert worked_on(jobs["refused"]) == [["0", "1"]]


def test_what_is_done_is_left_alone_and_what_another_run_makes_is_its_own(run: Run, sampling: GenerateRollouts) -> None:
    attempt = store.new_attempt(sampling)
    for index in range(FILES):
        finish(attempt, index)
    done, wanted = toys(run, "done", "wanted").values()
    committed(done)
    work_ahead(run, sampling, {"done": done, "wanted": wanted}, until=Future())
    assert worked_on(done) == [] and worked_on(wanted) == [["0", "1", "2"]]
    other = toys(run, "other")["other"]
    with (
        Lease(layout.lock(run.store, other.STAGE, other.fingerprint), what="toy"),
        pytest.raises(LeaseHeld),
    ):
        work_ahead(run, sampling, {"other": other}, until=Future())


def test_nothing_is_worked_on_ahead_in_a_replay_or_where_one_file_is_all(tmp_path: Path) -> None:
    for replay, size in ((True, 2), (False, 6)):
        overrides: dict[str, Any] = {"store": str(tmp_path / "store"), "rounds.prompts_per_round": 6}
        config = load_config("configs/quickstart.yaml", overrides={**overrides, "rounds.prompts_per_shard": size})
        with Run(config, display=Lines(), replay=replay) as run:
            ref = ArtifactRef(stage="toy", fingerprint="0" * 32)
            data = Outcome("data", ref, metrics={}, seconds=1.0, reused=False, path=run.store, costs=Costs(1.0))
            asked = rollouts_job(
                run, data=data, policy=ref, purpose="training", split="train", num_prompts=6, group_size=1
            )
            work_ahead(run, asked, toys(run, "only"), until=Future())
        assert not (tmp_path / "store" / "attempts").exists()
