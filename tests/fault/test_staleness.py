"""rounds.staleness 1: the next round is sampled while this one trains, and nothing of it depends on who is faster."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.artifacts import layout, schemas
from stages.artifacts.seeds import seed_at
from stages.artifacts.shards import read_rows
from stages.models.batches import TokenBatch, minibatches
from stages.models.language import TokenLogprobs, load_policy
from tests.fault.campaign import aim_at_random, chain
from tests.fault.equality import differences, litter
from tests.fault.trials import PPO, Case, Nursery, Reference, prefix, rng, trials, undisturbed

pytestmark = pytest.mark.timeout(0)
STALE = Case("stale-ppo", PPO.config, {**PPO.overrides, "rounds.staleness": 1})
ROUNDS = 3


def with_round_0(references: Mapping[str, Reference], store: Path) -> Path:
    """A store with round 0 of the run without staleness, and what comes before it: the same with either."""
    operations = references[PPO.name].operations
    prefix(references[PPO.name], store, before=next(i for i, o in enumerate(operations) if "round-001" in o.name))
    return store


@pytest.fixture(scope="module")
def stale(nursery: Nursery, references: Mapping[str, Reference], fault_home: Path) -> Reference:
    return undisturbed(nursery, STALE, with_round_0(references, fault_home / "reference" / STALE.name))


def test_round_0_is_that_of_a_run_without_staleness(references: Mapping[str, Reference], stale: Reference) -> None:
    theirs, mine = jobs(references[PPO.name].store), jobs(stale.store)
    same = [label for label in mine if theirs[label]["fingerprint"] == mine[label]["fingerprint"]]
    later = ("round-001", "round-002", "after-001", "after-002")
    assert sorted(same) == sorted(label for label in mine if not label.startswith(later))
    begun = {o.stage for o in stale.operations if o.name.startswith("mkdir attempts/")}
    assert "train_sft" not in begun and "update_policy" in begun


def test_also_without_it_a_round_is_sampled_while_the_trainer_writes_down_its_state(
    references: Mapping[str, Reference],
) -> None:
    reference = references[PPO.name]
    found, names = jobs(reference.store), [operation.name for operation in reference.operations]
    sampled, state = (found[f"round-{label}"] for label in ("002-generate_rollouts", "001-snapshot_trainer"))
    began = next(i for i, name in enumerate(names) if f"attempts/{sampled['stage']}/{sampled['fingerprint']}" in name)
    assert began < names.index(f"rename artifacts/{state['stage']}/{state['fingerprint']}")


def jobs(store: Path) -> Mapping[str, Any]:
    """The run's jobs by label."""
    (run,) = (store / "runs").iterdir()
    return {path.stem: json.loads(path.read_text()) for path in (run / "jobs").iterdir()}


def made(store: Path, job: Any) -> Path:
    return layout.artifact(store, job["stage"], job["fingerprint"])


def policies(found: Mapping[str, Any]) -> list[Any]:
    """The policy that each round started from, and the last one."""
    updates = [found[f"round-{index:03d}-update_policy"] for index in range(ROUNDS)]
    return [found["train_sft"], *updates]


def test_a_round_is_sampled_from_the_policy_that_the_round_before_it_started_from(stale: Reference) -> None:
    found = jobs(stale.store)
    started_from = [job["fingerprint"] for job in policies(found)]
    for index in range(ROUNDS):
        rollouts = found[f"round-{index:03d}-generate_rollouts"]
        rows = read_rows(made(stale.store, rollouts), "rollouts", schemas.ROLLOUTS)
        sampled_by = started_from[max(0, index - 1)]
        assert {row["policy_version"] for row in rows} == {rollouts["inputs"]["policy"]["fingerprint"]} == {sampled_by}
        looked = found[f"round-{index:03d}-compute_logprobs"]["inputs"]
        assert looked["state"]["policy"]["fingerprint"] == started_from[index]
        assert (looked["sampled_by"] or looked["state"]["policy"])["fingerprint"] == sampled_by
        update = found[f"round-{index:03d}-update_policy"]["inputs"]
        assert update["state"]["policy"]["fingerprint"] == started_from[index]
        manifest = made(stale.store, found[f"round-{index:03d}-compute_logprobs"]) / layout.MANIFEST
        assert json.loads(manifest.read_text())["metrics"]["logprob_difference_max"] < 1e-4


def test_the_first_ratio_is_between_the_rounds_policy_and_the_one_that_sampled(stale: Reference) -> None:
    """1 in round 0, where they are the same; after that what both say of the first minibatch."""
    found, store = jobs(stale.store), stale.store
    by_round = []
    for index in range(ROUNDS):
        update = found[f"round-{index:03d}-update_policy"]
        count = update["parameters"]["settings"]["algorithm"]["num_minibatches"]
        rows = read_rows(made(store, found[f"round-{index:03d}-generate_rollouts"]), "rollouts", schemas.ROLLOUTS)
        rows.sort(key=lambda row: (row["prompt_id"], row["sample_index"]))
        seed = seed_at(update["seed"], "update_policy", index, 0)
        first = minibatches([row["group_id"] for row in rows], count=count, seed=seed)[0]
        chosen = [rows[i] for i in first]
        started, sampled = policies(found)[index], policies(found)[max(0, index - 1)]
        ratios = (says(made(store, started), chosen) - says(made(store, sampled), chosen)).exp()
        metrics = read_rows(made(store, update), "metrics", schemas.METRICS)
        (ratio,) = (row["value"] for row in metrics if row["metric"] == "ratio" and row["step"] == 0)
        assert ratio == pytest.approx(float(ratios.mean()), abs=1e-5)
        by_round.append((ratio, float((ratios - 1.0).abs().max())))
    assert by_round[0][0] == pytest.approx(1.0, abs=1e-6) and by_round[0][1] == 0.0
    assert all(most > 1e-4 for _, most in by_round[1:]), by_round


def says(artifact: Path, rows: list[Any]) -> torch.Tensor:
    """The logprobs of the rows' completions by a committed policy."""
    model = TokenLogprobs(load_policy(artifact / "policy", dtype="float32")).eval()
    batch = TokenBatch.of(
        [row["prompt_ids"] for row in rows], [row["completion_ids"] for row in rows], device=torch.device("cpu")
    )
    with torch.no_grad():
        found: torch.Tensor = model(batch.packed, batch.select_M, batch.targets_M, 1.0)[0]
    return found


def test_one_after_the_other_with_new_workers_and_fewer_policies_it_has_the_same_bits(
    nursery: Nursery, references: Mapping[str, Reference], stale: Reference, tmp_path: Path
) -> None:
    store = with_round_0(references, tmp_path / "store")
    ended = nursery.finish(STALE, store, in_turn=True, cold=True, overrides={"retention.policies": 2})
    found = differences(stale.store, store)
    assert [line for line in found if "document config.json" not in line] + litter(store) == [] and len(found) == 1
    released = [policy for policy in policies(jobs(store))[1:] if (made(store, policy) / layout.RELEASED).exists()]
    assert len(released) == 1, "two are kept, and the best one is one of them"
    assert "made again" not in ended.out, "what is released is not needed any more"


def test_killed_while_one_round_trains_and_the_next_is_sampled_it_ends_with_the_same_bits(
    nursery: Nursery, references: Mapping[str, Reference], stale: Reference, tmp_path: Path
) -> None:
    started, store = time.monotonic(), with_round_0(references, tmp_path / "store")
    done = chain(nursery, stale, store, aim_at_random(rng("stale")), deaths=trials(4, full=100))
    print(f"staleness 1: {done.deaths} kills, different: {len(done.different)}; {time.monotonic() - started:.0f} s")
    assert done.different == []
