"""The stage evaluate_policy: figures, intervals and samples, from rollouts and rewards joined by key."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from stages.artifacts.durable import read_json
from stages.artifacts.errors import GateError, InputError
from stages.evaluate_policy.job import EvaluatePolicy, Inputs, Parameters
from stages.evaluate_policy.run import run
from stages.program import Context
from tests.unit.stage_artifacts import Row, commit_rewards, commit_rollouts, rollout, run_stage


def reward(prompt_id: str, source: str, value: float) -> Row:
    return {"prompt_id": prompt_id, "sample_index": 0, "source": source, "reward": value}


def job(store: Path, rows: list[Row], rewards: list[Row], *, samples: int = 2) -> EvaluatePolicy:
    inputs = Inputs(rollouts=commit_rollouts(store, rows, shards=2), rewards=commit_rewards(store, rewards))
    return EvaluatePolicy(store=store, seed=1, inputs=inputs, parameters=Parameters(samples=samples))


def an_evaluation() -> tuple[list[Row], list[Row]]:
    rows = [rollout(f"p{i}", 0, tokens=i + 1, completion=f"c{i}") for i in range(4)]
    rows[3]["finish_reason"] = "length"
    rewards = [reward(f"p{i}", "exact_match", float(i < 3)) for i in range(4)]
    rewards += [reward(f"p{i}", "place", i / 2) for i in range(4)]
    rewards += [reward(f"p{i}", "total", float(i)) for i in range(4)]
    return rows, rewards


def test_figures_by_hand(tmp_path: Path) -> None:
    directory, metrics = run_stage(run, job(tmp_path, *an_evaluation()))
    document = read_json(directory / "evaluation.json")
    assert metrics == {
        "exact_match_mean": 0.75,
        "place_mean": 0.75,
        "total_mean": 1.5,
        "mean_completion_tokens": 2.5,
        "truncated_fraction": 0.25,
    }
    # Wilson for 3 of 4, z = 1.959964, z^2 = 3.841459: centre (0.75 + 0.480182) / 1.960365 = 0.627527,
    # half 1.959964 * sqrt(0.1875/4 + 3.841459/64) / 1.960365 = 0.326885
    exact = document["exact_match"]
    assert [exact["low"], exact["high"]] == pytest.approx([0.300642, 0.954413], abs=1e-5)
    # 0, 0.5, 1, 1.5: mean 0.75, Bessel variance 1.25/3, half 1.959964 * sqrt(0.416667/4) = 0.632574
    place = document["place"]
    assert [place["mean"], place["low"], place["high"]] == pytest.approx([0.75, 0.117426, 1.382574], abs=1e-5)
    assert place["n"] == 4
    tokens = document["completion_tokens"]
    assert (tokens["mean"], tokens["min"], tokens["max"], tokens["truncated_fraction"]) == (2.5, 1, 4, 0.25)
    assert document["samples"] == [
        {
            "prompt_id": f"p{i}",
            "sample_index": 0,
            "prompt": "p",
            "completion": f"c{i}",
            "answer": "a",
            "finish_reason": "stop",
            "rewards": {"exact_match": 1.0, "place": i / 2, "total": float(i)},
        }
        for i in range(2)
    ]


def test_the_interval_covers_the_truth_about_as_often_as_it_says(tmp_path: Path) -> None:
    rng = random.Random(1)
    covered = 0
    for repeat in range(60):
        values = [float(rng.random() < 0.3) for _ in range(50)]
        rows = [rollout(f"p{i:02}", 0) for i in range(50)]
        rewards = [reward(f"p{i:02}", "exact_match", value) for i, value in enumerate(values)]
        directory, _ = run_stage(run, job(tmp_path / str(repeat), rows, rewards, samples=0))
        figures = read_json(directory / "evaluation.json")["exact_match"]
        covered += figures["low"] <= 0.3 <= figures["high"]
    assert 53 <= covered <= 60


def test_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    rows, rewards = an_evaluation()
    straight, metrics = run_stage(run, job(tmp_path, rows, rewards))
    turned, other = run_stage(run, job(tmp_path, rows[::-1], [*rewards[4:], *rewards[3::-1]]))
    assert read_json(straight / "evaluation.json") == read_json(turned / "evaluation.json")
    assert metrics == other


def test_extremes_stay_inside_their_range(tmp_path: Path) -> None:
    rows, _ = an_evaluation()
    for value in (0.0, 1.0):
        directory, _ = run_stage(run, job(tmp_path, rows, [reward(f"p{i}", "exact_match", value) for i in range(4)]))
        figures = read_json(directory / "evaluation.json")["exact_match"]
        assert 0.0 <= figures["low"] <= value <= figures["high"] <= 1.0
        assert figures["high"] - figures["low"] > 0.4  # four agreeing rollouts prove little
    directory, _ = run_stage(run, job(tmp_path, rows[:1], [reward("p0", "place", 0.4)], samples=9))
    document = read_json(directory / "evaluation.json")
    assert document["place"]["low"] == document["place"]["high"] == pytest.approx(0.4)
    assert len(document["samples"]) == 1


def test_bad_inputs_are_named(tmp_path: Path) -> None:
    rows, rewards = an_evaluation()
    with pytest.raises(InputError, match=r"row \('p3', 0\) is in rollouts but not in rewards of total"):
        run_stage(run, job(tmp_path, rows, rewards[:-1]))
    with pytest.raises(InputError, match=r"source total: row \('p3', 0\) occurs twice"):
        run_stage(run, job(tmp_path, rows, [*rewards, rewards[-1]]))
    with pytest.raises(InputError, match="reward source 'samples': expected a name other than"):
        run_stage(run, job(tmp_path, rows, [reward(f"p{i}", "samples", 1.0) for i in range(4)]))
    with pytest.raises(GateError, match="reward source 'total': expected finite rewards, found nan for prompt_id p3"):
        run_stage(run, job(tmp_path, rows, [*rewards[:-1], reward("p3", "total", math.nan)]))
    with pytest.raises(GateError, match="expected rollouts and rewards to evaluate, found 0 rollouts"):
        run_stage(run, job(tmp_path, [], []))


def test_only_rank_0_writes(tmp_path: Path) -> None:
    assert run(job(tmp_path, *an_evaluation()), Context(out=tmp_path / "out", rank=1, world_size=2)) == {}
    assert not (tmp_path / "out").exists()
