"""Dynamic sampling: which prompts a refill takes, which groups are selected, and what the stage writes of them."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stages.artifacts.errors import GateError, InputError
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.schemas import GROUPS, REWARDS, ROLLOUTS
from stages.artifacts.seeds import seed_at
from stages.artifacts.shards import by_key, read_rows
from stages.generate_rollouts.prompts import batch_indices
from stages.select_rollouts.job import Inputs, Parameters, SelectRollouts
from stages.select_rollouts.run import run
from stages.select_rollouts.selection import Fate, Group, select_groups
from tests.unit.stage_artifacts import Row, commit_rewards, commit_rollouts, rollout, run_stage

SEED, ROUND = 17, 3


def groups_of(batches: list[list[tuple[float, float]]]) -> list[Group]:
    return [
        Group(f"{batch}-{index}", batch, min(pair), max(pair))
        for batch, pairs in enumerate(batches)
        for index, pair in enumerate(pairs)
    ]


def selected(groups: list[Group], *, wanted: int, min_spread: float = 0.0) -> dict[str, Fate]:
    return select_groups(groups, num_groups=wanted, min_spread=min_spread, seed=SEED, round_index=ROUND)


def by_loops(groups: list[Group], *, wanted: int, min_spread: float) -> dict[str, Fate]:
    """The definition, the long way: batch after batch, in each the least drawn number first."""
    fates: dict[str, Fate] = {g.prompt_id: "no_signal" for g in groups}
    taken = 0
    for batch in sorted({g.batch for g in groups}):
        left = [g for g in groups if g.batch == batch and g.highest - g.lowest > min_spread]
        while left:
            best = left[0]
            for g in left:
                if seed_at(SEED, "select_rollouts", ROUND, g.prompt_id) < seed_at(
                    SEED, "select_rollouts", ROUND, best.prompt_id
                ):
                    best = g
            left.remove(best)
            fates[best.prompt_id] = "selected" if taken < wanted else "not_needed"
            taken += 1
    return fates


REWARD = st.sampled_from([0.0, 0.25, 0.5, 1.0])
BATCHES = st.lists(st.lists(st.tuples(REWARD, REWARD), min_size=1, max_size=5), min_size=1, max_size=4)


@given(BATCHES, st.integers(1, 8), st.sampled_from([0.0, 0.25, 0.5]), st.randoms(use_true_random=False))
def test_the_selection_obeys_its_laws(
    batches: list[list[tuple[float, float]]], wanted: int, min_spread: float, rng: random.Random
) -> None:
    groups = groups_of(batches)
    fates = selected(groups, wanted=wanted, min_spread=min_spread)
    assert fates == by_loops(groups, wanted=wanted, min_spread=min_spread)
    spread = {g.prompt_id: g.highest - g.lowest for g in groups}
    counts = Counter(fates.values())
    with_signal = sum(s > min_spread for s in spread.values())
    assert fates.keys() == spread.keys()
    assert all((fate == "no_signal") == (spread[name] <= min_spread) for name, fate in fates.items())
    assert counts["selected"] == min(wanted, with_signal)
    shuffled = rng.sample(groups, len(groups))
    assert selected(shuffled, wanted=wanted, min_spread=min_spread) == fates, "the order of the rows is nothing"
    for end in range(1, len(batches)):
        before = selected([g for g in groups if g.batch < end], wanted=wanted, min_spread=min_spread)
        assert before.items() <= fates.items(), "a refill changes nothing about what came before it"


def test_no_prompt_is_preferred_over_the_rounds() -> None:
    """Half of sixteen groups are needed: in 400 rounds each is taken about 200 times, whatever its name."""
    groups = groups_of([[(0.0, 1.0)] * 16])
    times: Counter[str] = Counter()
    for index in range(400):
        fates = select_groups(groups, num_groups=8, min_spread=0.0, seed=SEED, round_index=index)
        times.update(name for name, fate in fates.items() if fate == "selected")
    assert sum(times.values()) == 3200
    assert all(150 < times[g.prompt_id] < 250 for g in groups), times  # five standard deviations


def test_a_prompt_in_two_batches_is_refused() -> None:
    with pytest.raises(GateError, match="prompt_id a: expected it in one batch of the round, found it in two"):
        selected([Group("a", 0, 0.0, 1.0), Group("a", 1, 0.0, 1.0)], wanted=2)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 40), st.integers(0, 2**31 - 1))
def test_the_batches_of_a_round_share_no_prompt(available: int, count: int, window: int, seed: int) -> None:
    count = min(count, available)
    most = available // count
    batches = [
        batch_indices(available, count=count, window=window, batch=batch, split="train", seed=seed)
        for batch in range(most)
    ]
    assert all(len(batch) == count and batch == sorted(batch) for batch in batches)
    taken = [index for batch in batches for index in batch]
    assert len(set(taken)) == len(taken) and set(taken) <= set(range(available))
    with pytest.raises(InputError, match=f"expected at most {most} batches of {count} prompts from the {available}"):
        batch_indices(available, count=count, window=window, batch=most, split="train", seed=seed)


def test_an_epochs_first_batches_are_what_they_were_and_each_round_refills_in_its_own_order() -> None:
    def batch(window: int, index: int) -> list[int]:
        return batch_indices(20, count=4, window=window, batch=index, split="train", seed=SEED)

    epoch = [batch(window, 0) for window in range(5)]
    assert sorted(index for part in epoch for index in part) == list(range(20))
    order = list(range(20))
    random.Random(seed_at(SEED, "prompt_order", "train", 0)).shuffle(order)
    assert epoch == [sorted(order[at : at + 4]) for at in range(0, 20, 4)]
    assert len({tuple(batch(window, 1)) for window in range(5)}) == 5
    assert batch(5, 0) != epoch[0], "the next epoch has an order of its own"


def a_batch(store: Path, rewards: dict[str, list[float]]) -> tuple[ArtifactRef, ArtifactRef]:
    rows = [rollout(name, i, tokens=1 + i) for name, values in rewards.items() for i in range(len(values))]
    scored: list[Row] = [
        {"prompt_id": name, "sample_index": i, "source": source, "reward": value}
        for name, values in rewards.items()
        for i, value in enumerate(values)
        for source in ("rule", "total")
    ]
    return commit_rollouts(store, rows, shards=2), commit_rewards(store, scored)


def job(store: Path, *batches: dict[str, list[float]], wanted: int, is_last: bool = False) -> SelectRollouts:
    refs = [a_batch(store, batch) for batch in batches]
    return SelectRollouts(
        store=store,
        seed=SEED,
        inputs=Inputs(rollouts=tuple(r for r, _ in refs), rewards=tuple(s for _, s in refs)),
        parameters=Parameters(round_index=ROUND, num_groups=wanted, group_size=2, min_spread=0.0, is_last=is_last),
    )


FIRST = {"c": [0.0, 1.0], "a": [1.0, 1.0], "d": [0.0, 0.0]}
SECOND = {"b": [0.5, 0.0], "e": [0.0, 0.0], "f": [0.25, 1.0]}


def test_it_writes_the_selected_groups_whole_and_in_canonical_order(tmp_path: Path) -> None:
    directory, metrics = run_stage(run, job(tmp_path, FIRST, SECOND, wanted=3))
    keys = [(name, i) for name in ("b", "c", "f") for i in range(2)]
    rows = read_rows(directory, "rollouts", ROLLOUTS)
    assert [(row["prompt_id"], row["sample_index"]) for row in rows] == keys
    assert [len(row["completion_ids"]) for row in rows] == [1, 2] * 3
    rewards = read_rows(directory, "rewards", REWARDS)
    assert [(r["prompt_id"], r["sample_index"], r["source"]) for r in rewards] == [
        (*key, source) for key in keys for source in ("rule", "total")
    ]
    totals = by_key([r for r in rewards if r["source"] == "total"], where="rewards")
    assert [totals[key]["reward"] for key in keys] == [0.5, 0.0, 0.0, 1.0, 0.25, 1.0]
    fates = {row["prompt_id"]: (row["batch"], row["fate"]) for row in read_rows(directory, "groups", GROUPS)}
    assert fates == {
        **{"a": (0, "no_signal"), "c": (0, "selected"), "d": (0, "no_signal")},
        **{"b": (1, "selected"), "e": (1, "no_signal"), "f": (1, "selected")},
    }
    assert metrics == {
        "batches": 2.0,
        "groups_sampled": 6.0,
        "groups_selected": 3.0,
        "groups_not_needed": 0.0,
        "dropped_group_fraction": 0.5,
    }


def test_too_few_groups_are_no_round_yet_unless_no_batch_follows(tmp_path: Path) -> None:
    waiting, metrics = run_stage(run, job(tmp_path, FIRST, wanted=2))
    assert metrics["groups_selected"] == 1.0
    assert not list(waiting.glob("rollouts-*")) and list(waiting.glob("groups-*"))
    last, metrics = run_stage(run, job(tmp_path, FIRST, wanted=2, is_last=True))
    assert metrics["groups_selected"] == 1.0
    assert {row["prompt_id"] for row in read_rows(last, "rollouts", ROLLOUTS)} == {"c"}


def test_a_round_without_any_signal_is_said_and_not_trained_on(tmp_path: Path) -> None:
    silent = {"a": [1.0, 1.0], "b": [0.0, 0.0]}
    with pytest.raises(GateError) as stopped:
        run_stage(run, job(tmp_path, silent, {"c": [0.5, 0.5]}, wanted=2, is_last=True))
    assert str(stopped.value) == (
        "round 3: expected a group whose rewards are more than 0 apart, found none among 3 in 2 batches, so there is "
        "nothing to learn from; raise rounds.group_size or rounds.dynamic_sampling.max_batches, or give prompts or "
        "rewards that tell the policy's completions apart"
    )


def test_a_group_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="expected 2 rewards of prompt_id a, found 1"):
        run_stage(run, job(tmp_path, {"a": [1.0], "b": [0.0, 1.0]}, wanted=1))


def test_each_batch_needs_its_rewards() -> None:
    ref = ArtifactRef(stage="toy", fingerprint="a" * 32)
    with pytest.raises(ValidationError, match="rewards: expected 2, one per batch, found 1"):
        Inputs(rollouts=(ref, ref), rewards=(ref,))
