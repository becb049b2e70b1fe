"""R13: a reward server that fails in twelve ways. No reward is made up, none is lost, and no rollout is touched."""

from __future__ import annotations

import os
import struct
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from configs.rewards import HttpSource, VerifierSource
from stages.artifacts import durable, layout
from stages.artifacts.errors import SourceUnavailable
from stages.artifacts.schemas import REWARDS
from stages.artifacts.shards import read_rows
from stages.artifacts.store import new_attempt
from stages.program import Context
from stages.rewards import http
from stages.score_rollouts.job import Inputs, Parameters, ScoreRollouts
from stages.score_rollouts.run import run
from tests.fault.faulty_server import FAULTS, HARMLESS, FaultyServer, true_reward
from tests.unit.stage_artifacts import commit_rollouts, rollout, run_stage

TRIALS = 20 if os.environ.get("RATCHET_TORTURE") else 3
PROMPTS, GROUP, BATCH = 8, 3, 3
SHARDS = 2
NAMES = [f"rewards-{index:05d}.arrow" for index in range(SHARDS)]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(http, "LONGEST_PAUSE_SECONDS", 0.05)


def job(store: Path, url: str, *, seed: int = 0, batch_size: int = BATCH, **fields: Any) -> ScoreRollouts:
    rows = [rollout(f"prompt{p}", s, completion=f"{p}{s}") for p in range(PROMPTS) for s in range(GROUP)]
    server = HttpSource(url=url, name="server", batch_size=batch_size, **{"budget_seconds": 60.0, **fields})
    sources = (VerifierSource(verifier="exact_match"), server)
    return ScoreRollouts(
        store=store,
        seed=seed,
        inputs=Inputs(rollouts=commit_rollouts(store, rows, shards=SHARDS)),
        parameters=Parameters(sources=sources, code={}, dtype="float32", max_tokens_per_microbatch=64),
    )


def written(directory: Path) -> list[bytes]:
    """The rewards, file by file."""
    return [(directory / name).read_bytes() for name in NAMES]


def test_with_retries_the_rewards_are_those_of_a_server_without_faults(tmp_path: Path) -> None:
    started, failed, asked = time.monotonic(), 0, 0
    with FaultyServer() as server:
        healthy = written(run_stage(run, job(tmp_path, server.url))[0])
    for row in read_rows(job(tmp_path, server.url).ref.path(tmp_path), "rewards", REWARDS):
        if row["source"] == "server":
            truth = true_reward(f"{row['prompt_id']}/{row['sample_index']}")
            assert row["reward"] == struct.unpack("f", struct.pack("f", truth))[0]
    for fault in FAULTS:
        slow = fault in ("timeout", "slow drip")
        faults = 0
        for trial in range(TRIALS):
            with FaultyServer(fault, seed=trial) as server:
                scoring = job(tmp_path, server.url, seed=trial, timeout_seconds=0.3 if slow else 20.0)
                directory, _ = run_stage(run, scoring)
                assert written(directory) == healthy, (fault, trial)
                assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", *NAMES]
            faults += server.failures
            asked += len(server.requests)
            fate: dict[tuple[str, ...], list[bool]] = defaultdict(list)
            for ids, failing in server.requests:
                fate[ids].append(failing and fault != HARMLESS)
            assert len(fate) == PROMPTS * GROUP // BATCH
            # Asked until answered, and not once more; a slow machine may make a good answer come too late.
            assert all(not tries[-1] and (slow or all(tries[:-1])) for tries in fate.values()), (fault, trial, fate)
        assert faults > 0, fault
        failed += faults
    print(
        f"R13: {len(FAULTS)} kinds of fault x {TRIALS} trials, {failed} of {asked} requests failed: rewards equal in "
        f"{len(FAULTS) * TRIALS} of {len(FAULTS) * TRIALS}, none made up, {time.monotonic() - started:.1f} s"
    )


def test_a_spent_budget_pauses_and_writes_nothing(tmp_path: Path) -> None:
    started, paused = time.monotonic(), 0
    faults = [fault for fault in FAULTS if fault != HARMLESS]
    for fault in faults:
        with FaultyServer(fault, share=1.0) as server:
            scoring = job(tmp_path, server.url, budget_seconds=0.2, timeout_seconds=0.2)
            attempt = new_attempt(scoring)
            with pytest.raises(SourceUnavailable) as caught:
                run(scoring, Context(out=attempt))
        assert (caught.value.exit_code, caught.value.kind) == (69, "unavailable")
        message = str(caught.value)
        assert f"reward source 'server': expected rewards from {server.url} within 0.2 s" in message
        assert "The generations are kept" in message and "the same command goes on" in message
        assert not scoring.ref.path(tmp_path).exists() and list(attempt.iterdir()) == []
        paused += 1
    scoring = job(tmp_path, "http://127.0.0.1:9/score", budget_seconds=0.2)
    with pytest.raises(SourceUnavailable, match="the last one: ConnectError: Connection refused"):
        run(scoring, Context(out=new_attempt(scoring)))
    print(
        f"R13: {paused + 1} of {len(faults) + 1} dead servers ended in a pause (exit code 69), nothing written, "
        f"{time.monotonic() - started:.1f} s"
    )


def test_after_a_pause_only_what_was_not_answered_is_asked(tmp_path: Path) -> None:
    with FaultyServer() as server:
        server.change = lambda number, _: (503, {}, b"") if number >= 5 else None
        scoring = job(tmp_path, server.url, budget_seconds=0.2)
        with pytest.raises(SourceUnavailable, match=r"and so are 3 of 12 rewards"):
            run(scoring, Context(out=new_attempt(scoring)))
        before, server.change = [ids for ids, _ in server.requests[:5]], None
        count = len(server.requests)
        directory, _ = run_stage(run, scoring)
        after = [ids for ids, _ in server.requests[count:]]
        assert len(after) == 3 and not set(before) & set(after)
        again = job(tmp_path, server.url, seed=1)
        assert written(run_stage(run, again)[0]) == written(directory)
    assert not layout.attempts(tmp_path, scoring.STAGE, scoring.fingerprint).exists()


def test_another_batch_size_after_a_pause_mistakes_no_answer_for_another(tmp_path: Path) -> None:
    with FaultyServer() as server:
        whole = written(run_stage(run, job(tmp_path, server.url, seed=1))[0])
        server.change = lambda number, _: (503, {}, b"") if number >= 12 else None
        paused = job(tmp_path, server.url, budget_seconds=0.2)
        with pytest.raises(SourceUnavailable):
            run(paused, Context(out=new_attempt(paused)))
        server.change = None
        again = job(tmp_path, server.url, batch_size=5)
        assert again.fingerprint == paused.fingerprint
        directory, _ = run_stage(run, again)
        assert written(directory) == whole
        assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", *NAMES]


class Died(BaseException):
    """Stands for kill -9: nobody catches it."""


def test_death_before_any_durable_operation_costs_one_batch_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, operations = time.monotonic(), [0]
    batches = PROMPTS * GROUP // BATCH

    def die_at(number: int) -> None:
        def count(operation: str, path: Path) -> None:
            operations[0] += 1
            if operations[0] == number:
                raise Died

        operations[0] = 0
        monkeypatch.setattr(durable, "before_operation", count)

    with FaultyServer() as server:
        scoring = job(tmp_path, server.url)
        attempt = new_attempt(scoring)
        die_at(0)
        run(scoring, Context(out=attempt))
        last, whole = operations[0], written(attempt)
        few = [*range(1, 12), *range(12, last, 15), last]
        numbers = list(range(1, last + 1)) if os.environ.get("RATCHET_TORTURE") else few
        for number in numbers:
            scoring = job(tmp_path, server.url, seed=number)
            server.requests.clear()
            attempt = new_attempt(scoring)
            die_at(number)
            with pytest.raises(Died):
                run(scoring, Context(out=attempt))
            die_at(0)
            directory, _ = run_stage(run, scoring)
            assert written(directory) == whole
            # Answers are deleted only once the rewards of their shard are sealed.
            assert len(server.requests) <= batches + 1, number
            assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", *NAMES]
    print(
        f"R13: died before {len(numbers)} of {last} durable operations of a scoring by a server: same bits each time, "
        f"{time.monotonic() - started:.1f} s"
    )


def test_a_damaged_answer_is_asked_for_again(tmp_path: Path) -> None:
    with FaultyServer() as server:
        server.change = lambda number, _: (503, {}, b"") if number >= 5 else None
        scoring = job(tmp_path, server.url, budget_seconds=0.2)
        attempt = new_attempt(scoring)
        with pytest.raises(SourceUnavailable):
            run(scoring, Context(out=attempt))
        damaged = sorted(attempt.iterdir())[0]
        damaged.write_text(damaged.read_text().replace("-", "", 1).replace("1", "2"))
        server.change, count = None, len(server.requests)
        directory, _ = run_stage(run, scoring)
        assert len(server.requests) - count == 4
        again = job(tmp_path, server.url, seed=1)
        assert written(run_stage(run, again)[0]) == written(directory)
