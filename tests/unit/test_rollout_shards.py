"""What a stage makes of a round file by file: the same whenever it is made, and never of other rollouts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.rewards import FunctionSource, RewardModelSource, VerifierSource
from stages.artifacts import layout
from stages.artifacts.durable import digest_file, read_json, write_json
from stages.artifacts.errors import DamagedArtifact, GateError, InputError, TransientError
from stages.artifacts.manifest import Manifest
from stages.artifacts.schemas import REWARDS, ROLLOUTS
from stages.artifacts.seals import find_sealed
from stages.artifacts.shards import write_table
from stages.artifacts.store import commit, new_attempt
from stages.job import Compute, Job
from stages.program import Context
from stages.rollout_shards import RolloutShard, by_shard, digest_of_inputs, shards_of
from stages.score_rollouts.job import Inputs, Parameters, ScoreRollouts
from stages.score_rollouts.run import run
from tests.unit.stage_artifacts import Row, commit_rollouts, rollout
from tests.unit.test_stage_score_rollouts import NUMBERS, commit_reward_model

SOURCES = (VerifierSource(verifier="exact_match"), RewardModelSource(weight=0.5))
SHARDS = 3


def rollouts() -> list[Row]:
    answers = [f"{n:02d}" for n in range(7)]
    return [
        rollout(f"p{n}", 0, tokens=1 + n % 3, completion=answer[: 1 + n % 2], answer=answer)
        for n, answer in enumerate(answers)
    ]


def scoring(store: Path) -> ScoreRollouts:
    return ScoreRollouts(
        store=store,
        seed=1,
        inputs=Inputs(
            rollouts=commit_rollouts(store, rollouts(), shards=SHARDS), reward_model=commit_reward_model(store, NUMBERS)
        ),
        parameters=Parameters(sources=SOURCES, code={}, dtype="float32", max_tokens_per_microbatch=16),
    )


def made(job: Job, attempt: Path) -> tuple[dict[str, bytes], dict[str, float]]:
    """Run the stage in an attempt and commit that: its files and figures."""
    metrics = run(job, Context(out=attempt))  # type: ignore[arg-type]
    commit(job, attempt, metrics=metrics, wall_seconds=0.0)
    directory = job.ref.path(job.store)
    return {p.name: p.read_bytes() for p in directory.glob("*.arrow")}, metrics


@settings(deadline=None, max_examples=25)
@given(ahead=st.lists(st.lists(st.integers(0, SHARDS - 1), unique=True), max_size=3))
def test_whatever_was_worked_on_ahead_the_artifact_and_its_figures_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, ahead: Sequence[Sequence[int]]
) -> None:
    """ahead: attempts before the one that ends, and the files of rollouts that each worked on, in its order."""
    undisturbed = scoring(tmp_path_factory.mktemp("undisturbed"))
    expected = made(undisturbed, new_attempt(undisturbed))
    job = scoring(tmp_path_factory.mktemp("ahead"))
    shards = shards_of(job.store, job.inputs.rollouts)
    names: dict[int, int] = {}
    for indices in ahead:
        attempt = new_attempt(job)
        for index in indices:
            assert run(job, Context(out=attempt, shard=shards[index])) == {}
            path = layout.shard(attempt, "rewards", index)
            names.setdefault(index, os.stat(path).st_ino)
    assert made(job, new_attempt(job)) == expected
    for index, inode in names.items():  # adopted, not made again
        assert os.stat(layout.shard(job.ref.path(job.store), "rewards", index)).st_ino == inode


def test_what_was_made_of_other_rollouts_is_made_again(tmp_path: Path) -> None:
    job = scoring(tmp_path)
    (tmp_path / "0001").mkdir()
    other = layout.shard(tmp_path / "0001", "rollouts", 0)
    write_table(other, [rollout("p0", 0, completion="00", answer="00")], ROLLOUTS)
    first = new_attempt(job)
    changed = RolloutShard(0, digest_file(other), (other,))
    run(job, Context(out=first, shard=changed))
    files, _ = made(job, new_attempt(job))
    clean = scoring(tmp_path / "clean")
    assert files == made(clean, new_attempt(clean))[0]


def test_what_was_made_with_another_reward_model_is_made_again(tmp_path: Path) -> None:
    """Under the same name: it was made again from something else."""
    job = scoring(tmp_path)
    reward_model = job.inputs.reward_model
    assert reward_model is not None
    shard = shards_of(tmp_path, job.inputs.rollouts)[0]
    ahead = new_attempt(job)
    run(job, Context(out=ahead, shard=shard))

    def found() -> bool:
        made_from = digest_of_inputs(job, job.inputs.rollouts, shard)
        return find_sealed("rewards-00000.arrow", attempts=[ahead], made_from=made_from) is not None

    assert found()
    document = reward_model.path(tmp_path) / layout.MANIFEST
    manifest = read_json(document)
    manifest["files"]["reward_model.json"]["sha256"] = "0" * 64
    write_json(document, Manifest.model_validate(manifest).signed().model_dump(mode="json"))
    assert not found()


def test_rollouts_that_were_committed_meanwhile_are_found_where_they_are_now(tmp_path: Path) -> None:
    job = scoring(tmp_path)
    here = shards_of(job.store, job.inputs.rollouts)[0]
    moved = replace(here, places=(tmp_path / "attempts" / "gone.arrow", *here.places))
    assert moved.rows() == here.rows() is not None
    assert replace(here, places=(tmp_path / "gone.arrow",)).rows() is None
    other = replace(here, sha256="0" * 64)
    with pytest.raises(TransientError, match="expected rollouts with sha256"):
        run(job, Context(out=new_attempt(job), shard=other))


def test_a_shard_draws_from_its_own_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's function may draw: what it draws must not depend on what was made before it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_noisy_rule.py").write_text(
        "import random\n\ndef rate(*, prompt, completion, answer):\n    return random.random()\n"
    )
    source = FunctionSource(function="my_noisy_rule:rate")
    found = []
    for name, ahead in (("one", []), ("two", [2, 1])):
        job = scoring(tmp_path / name)
        job = job.model_copy(update={"parameters": job.parameters.model_copy(update={"sources": (source,)})})
        shards, attempt = shards_of(job.store, job.inputs.rollouts), new_attempt(job)
        for index in ahead:
            run(job, Context(out=attempt, shard=shards[index]))
        found.append(made(job, new_attempt(job)))
    assert found[0] == found[1]


def test_rollouts_that_are_damaged_are_said_to_be(tmp_path: Path) -> None:
    """Also where their times are those that were looked at before."""
    job = scoring(tmp_path)
    (path,) = shards_of(job.store, job.inputs.rollouts)[1].places
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DamagedArtifact):
        run(job, Context(out=new_attempt(job)))


def test_a_portion_that_one_of_two_ranks_finished_is_made_again_on_both(tmp_path: Path) -> None:
    class Both(Job):
        STAGE = "both"
        VERSION = 1

    job = Both(store=tmp_path, seed=1, compute=Compute(ranks=2))
    ref = commit_rollouts(tmp_path, rollouts(), shards=SHARDS)
    shards = shards_of(tmp_path, ref)
    asked: list[tuple[int, str]] = []

    def work(attempt: Path, rank: int, shard: RolloutShard | None) -> None:
        def make(rows: list[Row]) -> list[Row]:
            asked.append((rank, rows[0]["prompt_id"]))
            key = {name: rows[0][name] for name in ("prompt_id", "sample_index")}
            return [key | {"source": f"rank {rank}", "reward": 1.0}]

        context = Context(out=attempt, rank=rank, world_size=2, shard=shard)
        for _ in by_shard(job, ref, context, kind="rewards", schema=REWARDS, make=make):
            pass

    ahead = new_attempt(job)
    for rank, index in ((0, 0), (1, 0), (0, 1)):
        work(ahead, rank, shards[index])
    asked.clear()
    last = new_attempt(job)
    for rank in (0, 1):
        work(last, rank, None)
    assert sorted(asked) == [(rank, f"p{index}") for rank in (0, 1) for index in (1, 2)]
    assert len(list(last.glob("rewards-*.arrow"))) == 2 * SHARDS


def test_no_rollouts_and_the_same_rollout_twice_are_refused(tmp_path: Path) -> None:
    job = scoring(tmp_path)
    twice = commit_rollouts(tmp_path, [rollout("a", 0), rollout("a", 0)], shards=2)
    none = commit_rollouts(tmp_path, [], shards=1)
    for ref, error, message in (
        (twice, InputError, "occurs twice"),
        (none, GateError, "expected rollouts, found none"),
    ):
        changed = job.model_copy(update={"inputs": job.inputs.model_copy(update={"rollouts": ref})})
        with pytest.raises(error, match=message):
            run(changed, Context(out=new_attempt(changed)))
