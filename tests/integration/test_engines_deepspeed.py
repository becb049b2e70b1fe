"""Real DeepSpeed through the real stages: the same step however it is cut, dealt and partitioned; exact resume.

Weights are compared after one update of two optimizer steps (Adam, rate 2e-4). Float32 sums in another order differ
by about 1e-7, which Adam can magnify where a gradient is near zero: 2e-6 is a hundredth of one step's length.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.models import Lora
from stages.artifacts import layout, store
from stages.artifacts.errors import GateError
from stages.artifacts.manifest import Manifest
from stages.artifacts.reference import ArtifactRef
from stages.job import Job
from stages.snapshot_trainer.job import SnapshotTrainer
from stages.update_policy.job import TrainerState, UpdatePolicy, UpdateSettings
from tests.integration.stores import GRPO, PPO, House, hashes, settings

SAME_STEP = 2e-6
LORA = Lora(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"))
PLAIN = [(ranks, stage) for ranks in (1, 2) for stage in (0, 1, 2, 3)]
CASES: dict[str, UpdateSettings] = {
    **{f"{r} ranks, ZeRO {z}": settings(PPO, tied=z % 2 == 0, ranks=r, zero_stage=z) for r, z in PLAIN},
    **{f"tied {z}": settings(PPO, tied=True, ranks=r, zero_stage=z) for r, z in ((1, 1), (2, 3))},
    **{f"lora, ZeRO {z}": settings(GRPO, lora=LORA, ranks=2, zero_stage=z) for z in (0, 1, 3)},
    "bfloat16": settings(PPO, dtype="bfloat16", ranks=1, zero_stage=0),
    "bfloat16, ZeRO 2": settings(PPO, dtype="bfloat16", ranks=2, zero_stage=2),
}


@dataclass(frozen=True)
class Updates:
    """Two updates in a row, made by one warm pool."""

    first: UpdatePolicy
    second: UpdatePolicy


@pytest.fixture(scope="module")
def fresh_models(house: House) -> dict[bool, TrainerState]:
    """An untrained policy, tied and untied, and a critic."""
    house.pools.of(house.sft(ranks=2)).start()
    policies = {tied: house.make(house.sft(tied=tied, steps=1)) for tied in (True, False)}
    critic = house.make(house.critic(house.make(house.reward_model(policies[True]))))
    return {tied: TrainerState(policy=policy, critic=critic) for tied, policy in policies.items()}


def two_updates(house: House, chosen: UpdateSettings, state: TrainerState) -> Updates:
    if chosen.algorithm.name == "grpo":
        state = TrainerState(policy=state.policy)
    first = house.update(chosen, state, **house.written_round(version=state.policy.fingerprint))
    house.make(first)
    house.make(SnapshotTrainer.after(first))
    after = TrainerState(policy=first.ref, critic=first.ref if state.critic is not None else None)
    round_1 = house.written_round(version=first.fingerprint, seed=1)
    return Updates(first, house.update(chosen, after, **round_1, round_index=1))


@pytest.fixture(scope="module")
def updates(house: House, fresh_models: dict[bool, TrainerState]) -> dict[str, Updates]:
    """Every case's two updates, warm."""
    made = {}
    for name, chosen in CASES.items():
        tied = chosen.model.base.tied_embeddings  # type: ignore[union-attr]
        made[name] = two_updates(house, chosen, fresh_models[tied])
        house.make(made[name].second)
        house.make(SnapshotTrainer.after(made[name].second))
    return made


@contextmanager
def without(house: House, jobs: Sequence[Job]) -> Iterator[None]:
    """Have some artifacts not be there for a while."""
    paths = [job.ref.path(house.store) for job in jobs]
    away = [path.rename(house.store / f"away-{index}") for index, path in enumerate(paths)]
    try:
        yield
    finally:
        for here, there in zip(away, paths, strict=True):
            here.rename(there)


def holder(job: UpdatePolicy, part: str) -> ArtifactRef:
    """What holds a model after an update: a critic is part of the snapshot."""
    return job.ref if part == "policy" else SnapshotTrainer.after(job).ref


def weights(house: House, ref: ArtifactRef, part: str = "policy") -> dict[str, torch.Tensor]:
    return {k: t.float() for k, t in load_file(ref.path(house.store) / part / "model.safetensors").items()}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.parametrize("name", [name for name in CASES if "ranks" in name or "tied" in name])
def test_the_same_step_for_any_ranks_and_zero_stage(house: House, updates: dict[str, Updates], name: str) -> None:
    tied = CASES[name].model.base.tied_embeddings  # type: ignore[union-attr]
    reference, found = updates["tied 1" if tied else "1 ranks, ZeRO 1"], updates[name]
    start = weights(house, found.first.inputs.state.policy)
    for expected, made in ((reference.first, found.first), (reference.second, found.second)):
        for part in ("policy", "critic"):
            ours, theirs = weights(house, holder(made, part), part), weights(house, holder(expected, part), part)
            assert largest_difference(ours, theirs) < SAME_STEP, (name, part)
        ours_said, theirs_said = house.manifest(made.ref).metrics, house.manifest(expected.ref).metrics
        for metric in ("policy_loss", "policy_grad_norm", "critic_grad_norm", "value_loss", "entropy", "kl_to_old"):
            assert ours_said[metric] == pytest.approx(theirs_said[metric], rel=1e-4, abs=1e-6), (name, metric)
        assert ours_said["policy_grad_norm"] > 0.01
    assert largest_difference(start, weights(house, found.first.ref)) > 2e-4  # it did learn


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_step_for_small_and_large_microbatches(
    house: House, updates: dict[str, Updates], fresh_models: dict[bool, TrainerState], ranks: int
) -> None:
    """16 tokens: a row each, so with 2 ranks and 5 or 6 rows one rank also gets a filler."""
    state, rounds = fresh_models[False], house.written_round(version=fresh_models[False].policy.fingerprint)
    small = settings(PPO, tied=False, ranks=ranks, zero_stage=1, max_tokens_per_microbatch=16)
    made = house.update(small, state, **rounds)
    house.make(made)
    house.make(SnapshotTrainer.after(made))
    for part in ("policy", "critic"):
        expected = weights(house, holder(updates["1 ranks, ZeRO 1"].first, part), part)
        assert largest_difference(weights(house, holder(made, part), part), expected) < SAME_STEP


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fresh_process_makes_the_same_bits_from_the_saved_state(
    house: House, updates: dict[str, Updates], ranks: int
) -> None:
    """From the first update's snapshot: policy, moments, counters after the second, for every ZeRO stage."""
    different: list[str] = []
    with house.pools.fresh("trainer", ranks=ranks) as pool:
        for name, chosen in CASES.items():
            if chosen.trainer.ranks == ranks:
                for job in (updates[name].second, SnapshotTrainer.after(updates[name].second)):
                    again, committed = house.again(job, pool=pool), hashes(job.ref.path(house.store))
                    different += [f"{name}: {file}" for file in committed if again[file] != committed[file]]
    assert different == []


def test_a_trainer_that_left_its_device_goes_on_with_the_same_bits(house: House, updates: dict[str, Updates]) -> None:
    """Parameters, gradients and moments moved away and back between two jobs, for every ZeRO stage that can."""
    different: list[str] = []
    with house.pools.fresh("trainer", ranks=2) as pool:
        for name, chosen in CASES.items():
            if chosen.trainer.ranks == 2 and chosen.trainer.zero_stage > 0:
                for job in (updates[name].first, updates[name].second, SnapshotTrainer.after(updates[name].second)):
                    again, committed = house.again(job, pool=pool), hashes(job.ref.path(house.store))
                    different += [f"{name}: {file}" for file in committed if again[file] != committed[file]]
                    pool.rest(on_progress=lambda what, done, total: None)
                    assert pool.is_started, f"{name}: a rank that cannot leave its device is ended"
    assert different == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_snapshot_the_rollouts_lead_to_the_same_bits(
    house: House, updates: dict[str, Updates], ranks: int
) -> None:
    """Redo: the second snapshot is made again from the fresh models and two rounds of files, nothing else."""
    different: list[str] = []
    with house.pools.fresh("trainer", ranks=ranks) as pool:
        for name, chosen in CASES.items():
            if chosen.trainer.ranks != ranks:
                continue
            snapshots = [SnapshotTrainer.after(job) for job in (updates[name].first, updates[name].second)]
            committed = hashes(snapshots[1].ref.path(house.store))
            with without(house, snapshots):
                again = house.again(snapshots[1], pool=pool)
            different += [f"{name}: {file}" for file in committed if again[file] != committed[file]]
    assert different == []


def test_a_redo_that_leads_elsewhere_stops_the_run(house: House, updates: dict[str, Updates]) -> None:
    """The committed policy is replaced by another one, properly signed: what redo checks is the policy itself."""
    job = updates["1 ranks, ZeRO 1"].first
    path = job.ref.path(house.store) / layout.MANIFEST
    kept = path.read_bytes()
    document = json.loads(kept)
    document["files"]["policy/model.safetensors"]["sha256"] = "0" * 64
    path.write_text(json.dumps(Manifest.model_validate(document).signed().model_dump(mode="json")))
    snapshots = [SnapshotTrainer.after(made) for made in (job, updates["1 ranks, ZeRO 1"].second)]
    with without(house, snapshots), house.pools.fresh("trainer") as pool, pytest.raises(GateError) as caught:
        try:
            house.again(snapshots[1], pool=pool)
        finally:
            path.write_bytes(kept)
    assert f"redo of {job.ref} (round 0) gave another policy/model.safetensors" in str(caught.value)


def test_sft_resumes_inside_the_stage_to_the_same_bits(house: House, tmp_path: Path) -> None:
    """Killed after step 20 of 30 with a snapshot each 8 steps: the next attempt begins at step 16."""
    job = house.sft(steps=30, batch_size=8, snapshot_every=8)
    store_job = job.model_copy(update={"seed": 18})

    class Killed(Exception):
        pass

    def kill(what: str, done: int, total: int) -> None:
        if what == "optimizer steps" and done >= 20:
            raise Killed

    seen: list[str] = []
    attempt = store.new_attempt(store_job)
    with house.pools.fresh("trainer") as pool, pytest.raises(Killed):
        house.run(store_job, attempt, pool=pool, progress=kill)
    again = store.new_attempt(store_job)
    with house.pools.fresh("trainer") as pool:
        house.run(store_job, again, pool=pool, progress=lambda what, done, _: seen.append(f"{what} {done}"))
        undisturbed = house.again(store_job, pool=pool)
    assert seen[0] == "resuming from a snapshot at step 16" or "resuming from a snapshot at step 24" in seen[0]
    assert hashes(again) == undisturbed


@pytest.mark.parametrize(("saved", "now"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_from_the_snapshot(
    house: House, updates: dict[str, Updates], saved: int, now: int
) -> None:
    """Moments and master weights too: without them the second update would end elsewhere. ZeRO 3 redoes the first."""
    worst, redone = 0.0, []
    for stage in (0, 1, 2, 3):
        first, expected = updates[f"{saved} ranks, ZeRO {stage}"].first, updates[f"{now} ranks, ZeRO {stage}"].second
        state = TrainerState(policy=first.ref, critic=first.ref)
        round_1 = house.written_round(version=first.fingerprint, seed=1)
        job = house.update(CASES[f"{now} ranks, ZeRO {stage}"], state, **round_1, round_index=1)
        seen: set[str] = set()
        attempt = store.new_attempt(job)
        house.run(job, attempt, progress=lambda what, done, total: seen.add(what))  # noqa: B023
        redone += [stage] if "redoing updates" in seen else []
        made = load_file(attempt / "policy" / "model.safetensors")
        worst = max(worst, largest_difference(made, weights(house, expected.ref)))
    print(f"R23: {saved} -> {now} ranks, ZeRO 0 to 3: weights differ by at most {worst:.1e} (one step is 2e-4)")
    assert worst < SAME_STEP and redone == [3]


def test_sft_on_two_ranks_is_sft_on_one(house: House) -> None:
    one = house.make(house.sft(steps=3, batch_size=7))
    two = house.make(house.sft(steps=3, batch_size=7, ranks=2, zero_stage=2, max_tokens_per_microbatch=64))
    losses = [[row["value"] for row in house.rows(ref, "metrics")] for ref in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 3 and losses[0][2] < losses[0][0]
    held_out = [house.manifest(ref).metrics["held_out_loss"] for ref in (one, two)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4)


def test_lora_moves_only_the_modules_it_is_put_into(house: House, updates: dict[str, Updates]) -> None:
    """In the exported, merged policy: targets changed, everything else the same bits."""
    for name in CASES:
        if name.startswith("lora"):
            before = weights(house, updates[name].first.inputs.state.policy)
            after = weights(house, updates[name].second.ref)
            moved = {key for key in before if not torch.equal(before[key], after[key])}
            assert moved == {key for key in before if any(module in key for module in LORA.target_modules)}, name


def test_bfloat16_without_zero_steps_as_far_as_with_it(house: House, updates: dict[str, Updates]) -> None:
    """DeepSpeed's own bfloat16 without ZeRO divides the gradients by a loss scale that it never multiplied by."""
    moves = []
    for name in ("bfloat16", "bfloat16, ZeRO 2", "tied 1"):
        job = updates[name].second
        before, after = weights(house, job.inputs.state.policy), weights(house, job.ref)
        key = "model.layers.0.mlp.down_proj.weight"
        moves.append((after[key] - before[key]).abs().mean().item())
        assert house.manifest(job.ref).metrics["policy_grad_norm"] > 0.01
    assert moves[0] == pytest.approx(moves[1], rel=0.02)
    assert moves[0] == pytest.approx(moves[2], rel=0.25)


def test_a_stage_by_hand_reproduces_the_committed_bits(
    house: House, updates: dict[str, Updates], tmp_path: Path
) -> None:
    job = updates["lora, ZeRO 1"].second
    command = [sys.executable, "-m", "stages.update_policy.run", str(house.job_file(job)), "--out", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    count = len(hashes(job.ref.path(house.store)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} of {count} files are the same bits as the committed ones" in done.stdout
