"""The ledger: what each stage cost, also over two starts of a run, and what a person reads of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from flows.ledger import GrowingRows, Ledger, cost_row, metric_rows, summary_table
from stages.artifacts import layout, schemas
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.shards import read_rows, write_table
from tasks.display import Lines
from tasks.run import Costs, Outcome, Run


def run_in(tmp_path: Path) -> Run:
    run = Run(load_config("configs/quickstart.yaml", overrides={"store": str(tmp_path)}), display=Lines())
    run.directory.mkdir(parents=True, exist_ok=True)
    return run


def outcome(tmp_path: Path, label: str, *, reused: bool = False, **metrics: float) -> Outcome:
    """Ten seconds, of which the stage worked for six; where a model is at work, it was for two before that."""
    spans = {"ahead_seconds": 2.0, "least_seconds": 2.0} if "model_flops" in metrics else {}
    costs = (
        Costs(seconds=0.5)
        if reused
        else Costs(10.0, start_seconds=2.0, work_seconds=6.0, commit_seconds=0.5, bytes=7, **spans)
    )
    ref = ArtifactRef(stage=label.rpartition("-")[2], fingerprint="0" * 32)
    path = tmp_path / "artifact"
    return Outcome(label=label, ref=ref, metrics=metrics, seconds=6.0, reused=reused, path=path, costs=costs)


def test_the_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    row = cost_row(outcome(tmp_path, "round-003-update_policy", computed_tokens=600.0, model_flops=6e9))
    parts = (row[f"{name}_seconds"] for name in ("waiting", "start", "work", "commit"))
    assert row["seconds"] == pytest.approx(sum(parts)) == 10.0
    assert row["waiting_seconds"] == 1.5
    assert (row["round_index"], row["tokens"], row["model_flops"], row["bytes"]) == (3, 600, 6e9, 7)
    assert (row["tokens_per_second"], row["limit_share"]) == (75.0, 0.25)


def test_what_was_there_already_did_no_work(tmp_path: Path) -> None:
    row = cost_row(outcome(tmp_path, "train_sft", reused=True, computed_tokens=600.0, model_flops=6e9))
    assert (row["work_seconds"], row["tokens"], row["model_flops"], row["waiting_seconds"]) == (0.0, 0, 0.0, 0.5)


def test_a_second_start_keeps_what_the_first_one_spent(tmp_path: Path) -> None:
    first, second = run_in(tmp_path), run_in(tmp_path)
    first.outcomes.append(outcome(tmp_path, "train_sft"))
    Ledger(first).write()
    ledger = Ledger(second)
    second.outcomes.append(outcome(tmp_path, "train_sft", reused=True))
    ledger.write()
    second.outcomes.append(outcome(tmp_path, "round-000-generate_rollouts", generated_tokens=60.0))
    ledger.write()
    rows = read_rows(second.directory, "ledger", schemas.LEDGER)
    assert [(row["stage"], row["work_seconds"]) for row in rows] == [
        ("train_sft", 6.0),
        ("round-000-generate_rollouts", 6.0),
    ]


def test_a_start_that_does_less_takes_nothing_away(tmp_path: Path) -> None:
    """`--until sft` after the whole run; then a stage is made again."""
    first, partial, third = (run_in(tmp_path) for _ in range(3))
    first.outcomes += [outcome(tmp_path, "train_sft"), outcome(tmp_path, "round-000-update_policy")]
    Ledger(first).write()
    partial.outcomes.append(outcome(tmp_path, "train_sft", reused=True))
    Ledger(partial).write()
    third.outcomes.append(outcome(tmp_path, "train_sft", computed_tokens=60.0))
    Ledger(third).write()
    rows = read_rows(third.directory, "ledger", schemas.LEDGER)
    assert [(row["stage"], row["tokens"]) for row in rows] == [("round-000-update_policy", 0), ("train_sft", 60)]


def test_a_damaged_ledger_stops_nothing(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    layout.shard(run.directory, "ledger", 0).write_bytes(b"ARROW1 no more")
    run.outcomes.append(outcome(tmp_path, "train_sft"))
    Ledger(run).write()
    assert len(read_rows(run.directory, "ledger", schemas.LEDGER)) == 1


def test_a_full_file_is_not_written_again(tmp_path: Path) -> None:
    rows = [{"round_index": i, "stage": "s", "step": -1, "metric": "m", "value": i / 2} for i in range(11)]
    layout.shard(tmp_path, "metrics", 7).write_bytes(b"of an earlier start")
    growing = GrowingRows(tmp_path, "metrics", schemas.METRICS, rows_per_file=4)
    growing.add(rows[:6])
    growing.write()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["metrics-00000.arrow", "metrics-00001.arrow"]
    first = layout.shard(tmp_path, "metrics", 0).stat().st_mtime_ns
    for row in rows[6:]:
        growing.add([row])
        growing.write()
    assert read_rows(tmp_path, "metrics", schemas.METRICS) == rows
    assert layout.shard(tmp_path, "metrics", 0).stat().st_mtime_ns == first
    growing.begin_anew()
    growing.add(rows[:3])
    growing.write()
    assert read_rows(tmp_path, "metrics", schemas.METRICS) == rows[:3]


def test_figures_are_written_once_each(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    ledger = Ledger(run)
    made = outcome(tmp_path, "round-000-update_policy", policy_loss=0.5)
    made.path.mkdir()
    step: dict[str, Any] = {
        "round_index": 0,
        "stage": "update_policy",
        "step": 0,
        "metric": "policy_loss",
        "value": 0.5,
    }
    write_table(layout.shard(made.path, "metrics", 0), [step], schemas.METRICS)
    run.outcomes.append(made)
    ledger.write()
    ledger.write()
    rows = read_rows(run.directory, "metrics", schemas.METRICS)
    assert rows == metric_rows(made)
    assert [(row["stage"], row["step"], row["metric"]) for row in rows] == [
        ("round-000-update_policy", -1, "policy_loss"),
        ("round-000-update_policy", -1, "wall_seconds"),
        ("update_policy", 0, "policy_loss"),
    ]


def test_the_table_adds_rounds_up_and_puts_the_dearest_first(tmp_path: Path) -> None:
    rounds = [
        cost_row(outcome(tmp_path, f"round-{index:03d}-update_policy", computed_tokens=600.0, model_flops=6e9))
        for index in range(2)
    ]
    rows = [cost_row(outcome(tmp_path, "round-000-estimate_advantages")), *rounds]
    rows.append(cost_row(outcome(tmp_path, "train_sft", reused=True)))
    head, *lines = summary_table(rows)
    assert head.split() == [
        "seconds",
        "of",
        "times",
        "all",
        "waiting",
        "start",
        "work",
        "commit",
        "ahead",
        "tokens/s",
        "GFLOP/s",
        "of",
        "limit",
        "padding",
        "MB",
    ]
    assert [line.split() for line in lines] == [
        [
            "round-update_policy",
            "2",
            "20.00",
            "3.00",
            "4.00",
            "12.00",
            "1.00",
            "4.00",
            "75",
            "0.8",
            "25%",
            "0.0%",
            "0.0",
        ],
        ["round-estimate_advantages", "1", "10.00", "1.50", "2.00", "6.00", "0.50", "0.00", "-", "-", "-", "-", "0.0"],
    ]
    assert summary_table(rows[-1:]) == []


def test_the_costs_of_a_round_by_name(tmp_path: Path) -> None:
    """The next round may have been sampled already."""
    run = run_in(tmp_path)
    ledger = Ledger(run)
    labels = ("round-000-update_policy", "round-001-update_policy", "round-002-generate_rollouts")
    run.outcomes += [outcome(tmp_path, label) for label in (*labels, "after-001-generate_rollouts")]
    ledger.write()
    found = ledger.of_round(1)
    assert {name.split("/")[1] for name in found} == {"round-update_policy", "after-generate_rollouts"}
    assert found["cost/round-update_policy/work_seconds"] == 6.0
    assert found["cost/after-generate_rollouts/bytes"] == 7.0


def test_rates_and_shares_of_a_stage_that_runs_several_times_in_a_round_are_of_all_its_runs(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    ledger = Ledger(run)
    figures = {"model_flops": 1e9, "computed_tokens": 600.0}
    run.outcomes += [
        outcome(tmp_path, "round-000-compute_logprobs", padding_fraction=0.1, **figures),
        outcome(
            tmp_path, "round-000-001-compute_logprobs", padding_fraction=0.4, **figures | {"computed_tokens": 200.0}
        ),
    ]
    ledger.write()
    found = ledger.of_round(0)
    of = {name: found[f"cost/round-compute_logprobs/{name}"] for name in ("tokens_per_second", "limit_share")}
    assert of == {"tokens_per_second": 50.0, "limit_share": 0.25}
    assert found["cost/round-compute_logprobs/padding_fraction"] == pytest.approx(0.175)
