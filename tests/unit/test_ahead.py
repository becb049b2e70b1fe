"""Work on rollouts that are still being sampled: each file once, in order, by workers that may be lost.

The workers are real processes that serve real pipes; only the stages are toys.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest

from configs.load import load_config
from flows.round import begin_round
from flows.sampling import Sampling
from stages import worker
from stages.artifacts import layout, store
from stages.artifacts.errors import GateError
from stages.artifacts.lease import Lease
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.seals import seal
from stages.generate_rollouts.job import GenerateRollouts
from stages.update_policy.job import TrainerState
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
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
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


def test_what_is_done_and_what_another_run_makes_is_left_alone(run: Run, sampling: GenerateRollouts) -> None:
    attempt = store.new_attempt(sampling)
    for index in range(FILES):
        finish(attempt, index)
    done, wanted = toys(run, "done", "wanted").values()
    committed(done)
    work_ahead(run, sampling, {"done": done, "wanted": wanted}, until=Future())
    assert worked_on(done) == [] and worked_on(wanted) == [["0", "1", "2"]]
    other, last = toys(run, "other", "last").values()
    with Lease(layout.lock(run.store, other.STAGE, other.fingerprint), what="toy"):
        work_ahead(run, sampling, {"other": other, "last": last}, until=Future())
    assert worked_on(other) == [] and worked_on(last) == [["0", "1", "2"]]


@pytest.mark.parametrize("word", ["lost", "away", "refused"])
def test_whatever_fails_the_rest_is_left_to_the_stage(run: Run, sampling: GenerateRollouts, word: str) -> None:
    attempt = store.new_attempt(sampling)
    for index in range(FILES):
        finish(attempt, index)
    jobs = toys(run, word)
    work_ahead(run, sampling, jobs, until=Future())
    assert worked_on(jobs[word]) == [["0", "1"]]
    assert isinstance(run.display, Lines)
    said = ["worked on ahead" in line for line in run.display.lines]
    assert said == ([] if word == "refused" else [True]), "the stage will say what it refuses"


def test_a_shard_that_is_not_what_its_mark_says_is_waited_for(run: Run, sampling: GenerateRollouts) -> None:
    """What an attempt that was killed has left may be damaged; the one that samples it again comes later."""
    damaged = store.new_attempt(sampling)
    for index in range(FILES):
        finish(damaged, index)
    layout.shard(damaged, "rollouts", 1).write_bytes(b"!")
    jobs = toys(run, "only")

    def sample_again() -> None:
        attempt = store.new_attempt(sampling)
        for index in range(FILES):
            finish(attempt, index)

    Timer(0.5, sample_again).start()
    work_ahead(run, sampling, jobs, until=Future())
    assert worked_on(jobs["only"]) == [["0", "1", "2"]]


@pytest.mark.parametrize("why", ["a replay", "one shard", "the same cores", "the same GPU"])
def test_where_nothing_is_worked_on_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3 if why == "the same cores" else 4))
    overrides: dict[str, Any] = {"store": str(tmp_path / "store"), "rounds.prompts_per_round": 6}
    overrides["rounds.prompts_per_shard"] = 6 if why == "one shard" else 2
    overrides["resources.take_turns"] = why == "the same GPU"
    config = load_config("configs/quickstart.yaml", overrides=overrides)
    with Run(config, display=Lines(), replay=why == "a replay") as run:
        ref = ArtifactRef(stage="toy", fingerprint="0" * 32)
        data = Outcome("data", ref, metrics={}, seconds=1.0, reused=False, path=run.store, costs=Costs(1.0))
        asked = rollouts_job(run, data=data, policy=ref, purpose="training", split="train", num_prompts=6, group_size=1)
        work_ahead(run, asked, toys(run, "only"), until=Future())
    assert not (tmp_path / "store" / "attempts").exists()


def test_where_the_rollouts_are_kept_ones_nothing_is_looked_for_under_the_jobs_own_name(
    run: Run, sampling: GenerateRollouts
) -> None:
    """`--on-change keep`: they were sampled with other settings, and are named after those."""
    ref = ArtifactRef(stage="generate_rollouts", fingerprint="1" * 32)
    run.kept = {"round-000-generate_rollouts": ref}
    model = Outcome("model", ref, metrics={}, seconds=1.0, reused=False, path=run.store, costs=Costs(1.0))
    made: Future[Any] = Future()
    made.set_result(None)
    begin_round(
        run,
        round_index=0,
        sampling=Sampling(sampling, made),
        state=TrainerState(policy=ref),
        ref_policy=model,
        reward_model=None,
    )
    assert not (run.store / "attempts").exists()
