"""Real DeepSpeed through the real stages: the same step however it is cut, dealt and partitioned; exact resume.

Weights are compared after one update of two optimizer steps (Adam, rate 2e-4). Float32 sums in another order differ
by about 1e-7, which Adam can magnify where a gradient is near zero: 2e-6 is a hundredth of one step's length.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.models import Lora
from stages.artifacts.errors import InputError
from stages.artifacts.store import ArtifactRef
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
    critic = house.make(first) if state.critic is not None else None
    after = TrainerState(policy=house.make(first), critic=critic)
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
    return made


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
            ours, theirs = weights(house, made.ref, part), weights(house, expected.ref, part)
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
    made = house.make(house.update(small, state, **rounds))
    for part in ("policy", "critic"):
        expected = weights(house, updates["1 ranks, ZeRO 1"].first.ref, part)
        assert largest_difference(weights(house, made, part), expected) < SAME_STEP


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fresh_process_makes_the_same_bits_from_the_saved_state(
    house: House, updates: dict[str, Updates], ranks: int
) -> None:
    """Weights, optimizer moments, counters: every file of the second update, for every ZeRO stage."""
    different: list[str] = []
    with house.pools.fresh("trainer", ranks=ranks) as pool:
        for name, chosen in CASES.items():
            if chosen.trainer.ranks == ranks:
                job = updates[name].second
                again, committed = house.again(job, pool=pool), hashes(job.ref.path(house.store))
                different += [f"{name}: {file}" for file in committed if again[file] != committed[file]]
    assert different == []


@pytest.mark.parametrize(("saved", "now"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_from_the_saved_state(
    house: House, updates: dict[str, Updates], saved: int, now: int
) -> None:
    """Moments and master weights too: without them the second update would end elsewhere."""
    worst = 0.0
    for stage in (0, 1, 2):
        first, expected = updates[f"{saved} ranks, ZeRO {stage}"].first, updates[f"{now} ranks, ZeRO {stage}"].second
        state = TrainerState(policy=first.ref, critic=first.ref)
        round_1 = house.written_round(version=first.fingerprint, seed=1)
        made = house.make(house.update(CASES[f"{now} ranks, ZeRO {stage}"], state, **round_1, round_index=1))
        for part in ("policy", "critic"):
            worst = max(worst, largest_difference(weights(house, made, part), weights(house, expected.ref, part)))
    print(f"R23: {saved} -> {now} ranks, ZeRO 0 to 2: weights differ by at most {worst:.1e} (one step is 2e-4)")
    assert worst < SAME_STEP


def test_zero_3_state_of_other_ranks_is_refused(house: House, updates: dict[str, Updates]) -> None:
    first = updates["2 ranks, ZeRO 3"].first
    state = TrainerState(policy=first.ref, critic=first.ref)
    round_1 = house.written_round(version=first.fingerprint, seed=1)
    with pytest.raises(InputError, match=r"resources\.trainer\.ranks: expected 2, .*zero_stage 3, found 1"):
        house.make(house.update(CASES["1 ranks, ZeRO 3"], state, **round_1, round_index=1))


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
