"""The stage estimate_advantages: joins by key, refuses bad numbers, and writes what the equations give."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from configs.algorithms import Algorithm, Grpo, Ppo
from stages.artifacts.durable import write_json
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.schemas import ADVANTAGES
from stages.artifacts.shards import read_rows
from stages.estimate_advantages.job import EstimateAdvantages, Inputs, Parameters
from stages.estimate_advantages.run import run
from stages.program import Context
from stages.update_policy.job import TrainerState
from tests.unit import rl_oracles
from tests.unit.stage_artifacts import (
    Row,
    commit_files,
    commit_logprobs,
    commit_rewards,
    commit_rollouts,
    no_artifact,
    rollout,
    run_stage,
)

CRITIC = no_artifact("initialize_critic")
FRESH = TrainerState(policy=no_artifact("train_sft"), critic=CRITIC)


def reward(row: Row, value: float, *, source: str = "total") -> Row:
    return {"prompt_id": row["prompt_id"], "sample_index": row["sample_index"], "source": source, "reward": value}


def logprobs(row: Row, *, old: list[float], ref: list[float] | None = None, values: list[float] | None = None) -> Row:
    return {
        "prompt_id": row["prompt_id"],
        "sample_index": row["sample_index"],
        "old_logprobs": old,
        "ref_logprobs": ref or [],
        "values": values or [],
    }


def a_round(*, groups: int = 3, group_size: int = 2) -> tuple[list[Row], list[Row], list[Row]]:
    """Random rollouts, total rewards and logprobs, in canonical order."""
    rng = random.Random(5)
    rows = [rollout(f"p{g}", s, tokens=rng.randint(1, 6)) for g in range(groups) for s in range(group_size)]
    rewards = [reward(row, rng.choice([0.0, 0.5, 1.0])) for row in rows]

    def numbers(row: Row) -> list[float]:
        return [rng.uniform(-2, 0) for _ in row["completion_ids"]]

    return rows, rewards, [logprobs(row, old=numbers(row), ref=numbers(row), values=numbers(row)) for row in rows]


def job(
    store: Path, algorithm: Algorithm, rows: list[Row], rewards: list[Row], lps: list[Row], **inputs: Any
) -> EstimateAdvantages:
    return EstimateAdvantages(
        store=store,
        seed=1,
        inputs=Inputs(
            rollouts=commit_rollouts(store, rows, shards=min(2, len(rows))),
            rewards=commit_rewards(store, rewards),
            logprobs=commit_logprobs(store, lps),
            **{"state": FRESH, **inputs},
        ),
        parameters=Parameters(algorithm=algorithm),
    )


def advantages_of(directory: Path) -> dict[tuple[str, int], Row]:
    return {(r["prompt_id"], r["sample_index"]): r for r in read_rows(directory, "advantages", ADVANTAGES)}


def test_grpo_centres_each_group_and_spreads_over_tokens(tmp_path: Path) -> None:
    rows = [rollout("a", 0, tokens=1), rollout("a", 1, tokens=2), rollout("b", 0), rollout("b", 1)]
    rewards = [reward(row, value) for row, value in zip(rows, [1.0, 0.0, 0.5, 0.5], strict=True)]
    lps = [logprobs(row, old=[-1.0] * len(row["completion_ids"])) for row in rows]
    directory, metrics = run_stage(run, job(tmp_path, Grpo(), rows, rewards, lps))
    found = advantages_of(directory)
    # group a: mean 0.5 -> +0.5 and -0.5; group b: equal rewards -> no signal.
    assert found["a", 0]["advantages"] == [0.5]
    assert found["a", 1]["advantages"] == [-0.5, -0.5]
    assert found["b", 0]["advantages"] == [0.0, 0.0, 0.0]
    assert found["a", 1]["token_rewards"] == [0.0, 0.0]
    assert found["b", 1]["token_rewards"] == [0.0, 0.0, 0.5]
    assert all(row["returns"] == [] for row in found.values())
    assert metrics["reward_mean"] == 0.5
    assert metrics["zero_signal_group_fraction"] == 0.5
    assert metrics["completion_tokens_mean"] == (1 + 2 + 3 + 3) / 4
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.125))
    assert "kl_to_ref_mean" not in metrics and "explained_variance" not in metrics


def test_shares_of_truncated_rollouts_and_of_groups_without_signal(tmp_path: Path) -> None:
    rows = [rollout(f"p{g}", s) for g in range(4) for s in range(2)]
    rows[5]["finish_reason"] = "length"
    rewards = [reward(row, float(i == 5)) for i, row in enumerate(rows)]
    lps = [logprobs(row, old=[-1.0] * 3) for row in rows]
    _, metrics = run_stage(run, job(tmp_path, Grpo(), rows, rewards, lps))
    assert metrics["truncated_fraction"] == 0.125
    assert metrics["zero_signal_group_fraction"] == 0.75
    alone = [row for row in rows if row["sample_index"] == 0]
    values = [logprobs(row, old=[-1.0] * 3, ref=[-1.0] * 3, values=[0.0] * 3) for row in alone]
    _, metrics = run_stage(run, job(tmp_path, Ppo(), alone, [reward(row, 1.0) for row in alone], values))
    assert "zero_signal_group_fraction" not in metrics  # a prompt with one rollout has no group to speak of


def test_ppo_agrees_with_the_oracle_row_by_row(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    algorithm = Ppo(kl_coef=0.1, gae_lambda=0.9, discount=0.99, whiten_advantages=False)
    directory, metrics = run_stage(run, job(tmp_path, algorithm, rows, rewards, lps))
    found = advantages_of(directory)
    returns, values, kls = [], [], []
    for row, reward_row, lp in zip(rows, rewards, lps, strict=True):
        kl = [o - r for o, r in zip(lp["old_logprobs"], lp["ref_logprobs"], strict=True)]
        shaped = [-0.1 * k for k in kl]
        shaped[-1] += reward_row["reward"]
        advantages, targets = rl_oracles.gae(shaped, lp["values"], discount=0.99, gae_lambda=0.9)
        mine = found[row["prompt_id"], row["sample_index"]]
        assert mine["token_rewards"] == pytest.approx(shaped, abs=1e-6)
        assert mine["advantages"] == pytest.approx(advantages, abs=1e-6)
        assert mine["returns"] == pytest.approx(targets, abs=1e-6)
        returns += targets
        values += lp["values"]
        kls += kl
    assert metrics["kl_to_ref_mean"] == pytest.approx(sum(kls) / len(kls), abs=1e-6)
    k3 = [math.exp(-kl) - 1 + kl for kl in kls]
    assert metrics["kl_to_ref_k3_mean"] == pytest.approx(sum(k3) / len(k3), abs=1e-6)
    assert metrics["explained_variance"] == pytest.approx(rl_oracles.explained_variance(values, returns), abs=1e-5)


def test_ppo_whitens_over_the_round_and_leaves_returns_raw(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    raw, _ = run_stage(run, job(tmp_path, Ppo(whiten_advantages=False), rows, rewards, lps))
    white, metrics = run_stage(run, job(tmp_path, Ppo(), rows, rewards, lps))
    before, after = advantages_of(raw), advantages_of(white)
    flat = [x for row in before.values() for x in row["advantages"]]
    expected = iter(rl_oracles.whiten(flat))
    for key, row in after.items():
        assert row["advantages"] == pytest.approx([next(expected) for _ in row["advantages"]], abs=1e-5)
        assert row["returns"] == before[key]["returns"]
    assert metrics["advantage_mean"] == pytest.approx(0.0, abs=1e-7)


def test_the_order_of_rows_in_the_files_does_not_matter(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    extra = [reward(row, 7.0, source="exact_match") for row in rows]
    straight, metrics = run_stage(run, job(tmp_path, Ppo(), rows, rewards, lps))
    mixed = random.Random(3)
    for part in (rows, rewards, lps):
        mixed.shuffle(part)
    shuffled, other = run_stage(run, job(tmp_path, Ppo(), rows, extra + rewards, lps))
    name = "advantages-00000.arrow"
    assert (straight / name).read_bytes() == (shuffled / name).read_bytes()
    assert metrics == other


def test_kl_in_the_loss_leaves_the_rewards_alone(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    directory, _ = run_stage(run, job(tmp_path, Ppo(kl_coef=0.5, kl_placement="loss"), rows, rewards, lps))
    for row in advantages_of(directory).values():
        assert row["token_rewards"][:-1] == [0.0] * (len(row["token_rewards"]) - 1)


def test_grpo_with_kl_in_the_reward_centres_the_shaped_rewards(tmp_path: Path) -> None:
    rows = [rollout("a", 0, tokens=2), rollout("a", 1, tokens=1)]
    rewards = [reward(rows[0], 1.0), reward(rows[1], 0.0)]
    lps = [logprobs(rows[0], old=[-1.0, -1.0], ref=[-2.0, -3.0]), logprobs(rows[1], old=[-1.0], ref=[-2.0])]
    algorithm = Grpo(kl_coef=0.1, kl_placement="reward", kl_estimator="k1")
    directory, _ = run_stage(run, job(tmp_path, algorithm, rows, rewards, lps))
    # shaped: 1 - 0.1 * (1 + 2) = 0.7 and 0 - 0.1 * 1 = -0.1; mean 0.3 -> +-0.4
    assert advantages_of(directory)["a", 0]["advantages"] == pytest.approx([0.4, 0.4])
    assert advantages_of(directory)["a", 1]["advantages"] == pytest.approx([-0.4])


def commit_state(store: Path, document: dict[str, Any]) -> ArtifactRef:
    return commit_files(
        store, "update_policy", lambda out: write_json(out / "trainer.json", document), content=document
    )


def test_the_adaptive_coefficient_comes_from_the_trainer_state(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    algorithm = Ppo(kl_coef=0.05, kl_target=0.1)
    state = TrainerState(policy=commit_state(tmp_path, {"kl_coef": 0.08}), critic=CRITIC)
    _, metrics = run_stage(run, job(tmp_path, algorithm, rows, rewards, lps, state=state))
    assert metrics["kl_coef"] == 0.08
    _, metrics = run_stage(run, job(tmp_path, algorithm, rows, rewards, lps))
    assert metrics["kl_coef"] == 0.05
    broken = TrainerState(policy=commit_state(tmp_path, {"step": 3}), critic=CRITIC)
    with pytest.raises(InputError, match="expected a finite kl_coef of at least 0, found None"):
        run_stage(run, job(tmp_path, algorithm, rows, rewards, lps, state=broken))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["old_logprobs", "ref_logprobs", "values", "reward"])
def test_a_number_that_is_not_finite_is_named(tmp_path: Path, column: str, bad: float) -> None:
    rows, rewards, lps = a_round()
    if column == "reward":
        rewards[3]["reward"] = bad
    else:
        lps[3][column][-1] = bad
    with pytest.raises(GateError, match=f"rollout prompt_id p1, sample_index 1: expected finite {column}, found {bad}"):
        run_stage(run, job(tmp_path, Ppo(), rows, rewards, lps))
    assert not list((tmp_path / "artifacts" / "estimate_advantages").glob("*"))


def test_overflow_on_the_way_is_caught_at_the_end(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    rewards[0]["reward"], lps[0]["values"][-1] = 3e38, -3e38
    with pytest.raises(GateError, match="rollout prompt_id p0, sample_index 0: expected finite"):
        run_stage(run, job(tmp_path, Ppo(whiten_advantages=False, kl_coef=0), rows, rewards, lps))


def test_groups_must_be_of_one_size(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    with pytest.raises(GateError, match="group 0/p2: expected 2 rollouts as in the others, found 1"):
        run_stage(run, job(tmp_path, Grpo(), rows[:-1], rewards[:-1], lps[:-1]))


def test_missing_and_misshapen_rows_are_named(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    with pytest.raises(InputError, match=r"row \('p2', 1\) is in rollouts but not in rewards"):
        run_stage(run, job(tmp_path, Ppo(), rows, rewards[:-1], lps))
    with pytest.raises(InputError, match=r"row \('p2', 1\) is in rollouts but not in logprobs"):
        run_stage(run, job(tmp_path, Ppo(), rows, rewards, lps[:-1]))
    lps[0]["values"].append(0.0)
    with pytest.raises(GateError, match=r"prompt_id p0, sample_index 0: expected \d values, one per token, found \d"):
        run_stage(run, job(tmp_path, Ppo(), rows, rewards, lps))


def test_what_the_algorithm_needs_must_be_there(tmp_path: Path) -> None:
    rows, rewards, lps = a_round()
    bare = [{**lp, "values": []} for lp in lps]
    with pytest.raises(GateError, match="values: expected them, because ppo has a critic"):
        run_stage(run, job(tmp_path, Ppo(), rows, rewards, bare))
    bare = [{**lp, "ref_logprobs": []} for lp in lps]
    with pytest.raises(GateError, match="ref_logprobs: expected them, because the KL is placed in the reward"):
        run_stage(run, job(tmp_path, Ppo(), rows, rewards, bare))
    empty = [rollout("a", 0, tokens=0)]
    with pytest.raises(GateError, match="prompt_id a, sample_index 0: expected at least one completion token"):
        run_stage(run, job(tmp_path, Ppo(), empty, [reward(empty[0], 1.0)], [logprobs(empty[0], old=[])]))


def test_only_rank_0_writes(tmp_path: Path) -> None:
    assert run(job(tmp_path, Ppo(), *a_round()), Context(out=tmp_path / "out", rank=1, world_size=2)) == {}
    assert not (tmp_path / "out").exists()
