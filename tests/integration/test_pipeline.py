"""The whole pipeline on real vLLM and real DeepSpeed, started and read as a user does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.artifacts import schemas
from stages.artifacts.shards import read_rows, read_table
from tests.integration.pipelines import ROOT, TINY_PPO, Result, command, environment, run_flow

PPO_STAGES = (
    "prepare_datasets",
    "train_sft",
    "label_preferences",
    "train_reward_model",
    "initialize_critic",
    "generate_rollouts",
    "score_rollouts",
    "compute_logprobs",
    "estimate_advantages",
    "update_policy",
    "snapshot_trainer",
    "evaluate_policy",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def finished(store: Path, home: Path) -> Result:
    result = run_flow(TINY_PPO, store, home=home)
    assert result.code == 0, result.out + result.err
    return result


@pytest.fixture(scope="module")
def run_directory(finished: Result, store: Path) -> Path:
    (directory,) = [p for p in (store / "runs").iterdir() if (p / "summary.json").exists()]
    return directory


def test_every_stage_ran_and_the_summary_says_what_came_of_it(finished: Result, run_directory: Path) -> None:
    made = finished.made()
    assert len(made) == 37, made
    assert {label.split("-")[-1] for label in made} == set(PPO_STAGES)
    summary = json.loads((run_directory / "summary.json").read_text())
    assert [row["round"] for row in summary["rounds"]] == [-1, 0, 1, 2]
    for row in summary["rounds"][1:]:
        assert {"held_out", "reward", "kl", "entropy", "clip", "tokens", "gen_tok/s", "train_tok/s"} <= row.keys()
    assert summary["rounds"][1]["kl"] == pytest.approx(0.0, abs=1e-5), "policy_0 is the reference"
    assert (run_directory / "last" / "model.safetensors").exists()
    assert "held-out pair accuracy" in finished.out
    assert summary["final_policy_sha256"] in finished.out


def test_a_second_run_finds_everything_done(finished: Result, store: Path, home: Path) -> None:
    started = time.monotonic()
    again = run_flow(TINY_PPO, store, home=home)
    assert again.code == 0
    assert again.made() == []
    assert sorted(again.reused()) == sorted(finished.made())
    assert time.monotonic() - started < 10.0


def test_generator_and_trainer_agree_for_every_policy(finished: Result, store: Path) -> None:
    manifests = [json.loads(p.read_text()) for p in (store / "artifacts" / "compute_logprobs").glob("*/manifest.json")]
    assert len(manifests) == 3
    for manifest in manifests:
        assert 0.0 < manifest["metrics"]["logprob_difference_max"] < 1e-4


def test_a_changed_reward_weight_runs_scoring_and_what_follows_alone(finished: Result, store: Path, home: Path) -> None:
    result = run_flow(TINY_PPO, store, "--set", "rewards.0.weight=0.5", "--rounds", "1", home=home)
    assert result.code == 0, result.out + result.err
    made = result.made()
    assert made == [
        "round-000-score_rollouts",
        "round-000-estimate_advantages",
        "round-000-update_policy",
        "round-000-snapshot_trainer",
        "after-000-generate_rollouts",
        "after-000-score_rollouts",
        "after-000-evaluate_policy",
    ]
    assert "round-000-compute_logprobs" in result.reused()


def test_killed_in_round_2_it_ends_with_the_same_policy(
    finished: Result, run_directory: Path, tmp_path: Path, home: Path
) -> None:
    expected = json.loads((run_directory / "summary.json").read_text())["final_policy_sha256"]
    flow = subprocess.Popen(
        command(TINY_PPO, tmp_path), cwd=ROOT, env=environment(home), stdout=subprocess.PIPE, text=True
    )
    assert flow.stdout is not None
    for line in flow.stdout:
        if line.startswith("round-001-score_rollouts"):
            break
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    before = {p.parent.name for p in (tmp_path / "artifacts").glob("*/*/manifest.json")}
    again = run_flow(TINY_PPO, tmp_path, home=home)
    assert again.code == 0, again.out + again.err
    assert before, "something was committed before the kill"
    assert "round-001-generate_rollouts" in again.reused()
    assert not {label for label in again.made() if label.startswith(("prep", "train", "init", "round-000"))}
    assert expected in again.out


def test_how_often_snapshots_are_made_changes_no_bit(finished: Result, store: Path, tmp_path: Path, home: Path) -> None:
    """After every round against after the last alone: the same artifacts, and two snapshots more."""
    often = run_flow(TINY_PPO, tmp_path, "--set", "rounds.snapshot_every=1", home=home)
    assert often.code == 0, often.out + often.err

    def files(root: Path) -> dict[str, str]:
        manifests = [json.loads(p.read_text()) for p in (root / "artifacts").glob("*/*/manifest.json")]
        return {f"{m['stage']}/{m['fingerprint']}/{n}": e["sha256"] for m in manifests for n, e in m["files"].items()}

    seldom, more = files(store), files(tmp_path)
    labels = [label for label in often.made() if "snapshot" in label]
    assert labels == [f"round-00{index}-snapshot_trainer" for index in range(3)]
    common = seldom.keys() & more.keys()
    assert {name for name in common if seldom[name] != more[name]} == set()
    assert sum(name.startswith("snapshot_trainer/") for name in common) >= 5
    assert {name.partition("/")[0] for name in more.keys() - seldom.keys()} == {"snapshot_trainer"}


def test_a_failed_stage_is_resumed_by_the_same_command(
    finished: Result, store: Path, home: Path, tmp_path: Path
) -> None:
    rule = tmp_path / "house_rule.py"
    rule.write_text("def reward(*, prompt, completion, answer):\n    raise RuntimeError('the judge is ill')\n")
    more = (
        *("--set", "rewards=[{kind: function, function: 'house_rule:reward'}, {kind: reward_model}]"),
        *("--rounds", "1"),
    )
    failed = run_flow(TINY_PPO, store, *more, home=home, PYTHONPATH=str(tmp_path))
    assert failed.code == 2, "the rule must change before the same command can succeed"
    assert "the judge is ill" in failed.err
    assert "Traceback" not in failed.out + failed.err
    rule.write_text("def reward(*, prompt, completion, answer):\n    return float(len(completion) == len(answer))\n")
    resumed = run_flow(TINY_PPO, store, *more, home=home, PYTHONPATH=str(tmp_path))
    assert resumed.code == 0, resumed.out + resumed.err
    assert resumed.made()[0] == "round-000-score_rollouts"
    rule.write_text(
        "# a comment\ndef reward(*, prompt, completion, answer):\n    return float(len(completion) == len(answer))\n"
    )
    assert run_flow(TINY_PPO, store, *more, home=home, PYTHONPATH=str(tmp_path)).made() == []


def test_a_damaged_artifact_is_put_aside_and_made_again(finished: Result, store: Path, home: Path) -> None:
    victim = sorted((store / "artifacts" / "estimate_advantages").glob("*/advantages-00000.arrow"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    manifest = (victim.parent / "manifest.json").read_text()
    result = run_flow(TINY_PPO, store, home=home)
    if victim.parent.name not in "".join(p.name for p in (store / "quarantine").rglob("*")):
        result = run_flow(TINY_PPO, store, "--set", "rewards.0.weight=0.5", "--rounds", "1", home=home)
    assert result.code == 0, result.out + result.err
    assert f"damaged artifact estimate_advantages/{victim.parent.name}" in result.out
    assert json.loads((victim.parent / "manifest.json").read_text())["files"] == json.loads(manifest)["files"]


@pytest.mark.parametrize(
    "stage", ["prepare_datasets", "label_preferences", "generate_rollouts", "estimate_advantages", "update_policy"]
)
def test_a_stage_runs_by_hand_to_the_same_bits(
    stage: str, finished: Result, run_directory: Path, tmp_path: Path
) -> None:
    job = sorted((run_directory / "jobs").glob(f"*{stage}.json"))[-1]
    argv = [sys.executable, "-m", f"stages.{stage}.run", str(job)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert "is already done" in done.stdout
    again = subprocess.run(
        [*argv, "--out", str(tmp_path / "again")], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "files are the same bits as the committed ones" in again.stdout


def test_rollouts_open_as_they_are(finished: Result, store: Path) -> None:
    import datasets
    import duckdb
    import polars
    import pyarrow.ipc

    path = sorted((store / "artifacts" / "generate_rollouts").glob("*/rollouts-00000.arrow"))[0]
    expected = read_table(path, schemas.ROLLOUTS).to_pylist()
    rollouts = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
    assert datasets.Dataset(rollouts)["prompt"][:] == [row["prompt"] for row in expected]
    found = duckdb.sql("select sum(len(completion_ids)) from rollouts").fetchall()
    assert found == [(sum(len(row["completion_ids"]) for row in expected),)]
    assert polars.read_ipc(path)["completion"].to_list() == [row["completion"] for row in expected]


def test_a_model_of_ones_own_starts_the_rounds(finished: Result, run_directory: Path, store: Path, home: Path) -> None:
    base = (run_directory / "last").resolve()
    more = (
        *("--set", f"model.base={{kind: pretrained, path: {base}}}", "--set", "sft=null"),
        *("--set", "data.demonstrations=null", "--set", "data.preferences=null", "--set", "reward_model=null"),
        *("--set", "algorithm={name: grpo}", "--set", "rewards=[{kind: verifier, verifier: position_match}]"),
        *("--set", "evaluation.rewards=[{kind: verifier, verifier: exact_match}]"),
        *("--set", "model.lora={rank: 4}", "--set", "rounds.group_size=4", "--rounds", "1"),
    )
    result = run_flow(TINY_PPO, store, *more, home=home)
    assert result.code == 0, result.out + result.err
    assert "round-000-update_policy" in result.made()
    weights = base / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        refused = run_flow(TINY_PPO, store, *more, "--until", "sft", home=home)
        changed = run_flow(TINY_PPO, store, *more, "--until", "sft", "--on-change", "rebuild", home=home)
    finally:
        weights.write_bytes(kept)
    assert refused.code == 2 and "when the run began" in refused.err
    assert changed.made() == ["train_sft"], "other weights are another recipe"


def test_figures_of_every_stage_are_in_one_arrow_file(finished: Result, run_directory: Path) -> None:
    rows = read_rows(run_directory, "metrics", schemas.METRICS)
    names = {(row["round_index"], row["stage"], row["metric"]) for row in rows}
    assert (2, "round-002-update_policy", "policy_loss") in names
    assert (-1, "train_sft", "train_loss") in names
    assert (1, "after-001-evaluate_policy", "exact_match_mean") in names
    steps = [row for row in rows if row["stage"] == "update_policy" and row["metric"] == "policy_loss"]
    assert len(steps) == 3 * 4, "three rounds of four optimizer steps"


def test_the_ledger_says_where_the_time_went(finished: Result, run_directory: Path) -> None:
    rows = read_rows(run_directory, "ledger", schemas.LEDGER)
    by_stage = {row["stage"]: row for row in rows}
    assert len(by_stage) == len(rows) == len(finished.made())
    for row in rows:
        parts = sum(row[f"{name}_seconds"] for name in ("waiting", "start", "work", "commit"))
        assert row["seconds"] == pytest.approx(parts)
        assert row["waiting_seconds"] > 0.0 and row["work_seconds"] > 0.0 and row["bytes"] > 0
    sampled = [row for row in rows if row["stage"].endswith("generate_rollouts")]
    assert all(row["tokens"] > 0 and row["model_flops"] > 0.0 and row["tokens_per_second"] > 0.0 for row in sampled)
    assert sampled[0]["start_seconds"] > 10.0 * sampled[-1]["start_seconds"], "one engine, made for the first"
    for stage in ("train_sft", "train_reward_model", "round-001-compute_logprobs", "round-001-update_policy"):
        assert by_stage[stage]["tokens"] > 0 and by_stage[stage]["model_flops"] > 0.0
        assert by_stage[stage]["padding_fraction"] == 0.0, "one rank repeats nothing"
    for row in rows:
        is_ahead = row["stage"].startswith("round-") and row["stage"].endswith(("score_rollouts", "compute_logprobs"))
        assert (row["ahead_seconds"] > 0.0) == is_ahead, "what a round's shards are for was made as they came"
    for stage in ("round-001-generate_rollouts", "round-001-compute_logprobs", "round-001-update_policy"):
        row = by_stage[stage]
        assert 0.0 < row["least_seconds"] < row["work_seconds"] + row["ahead_seconds"]
    assert "seconds of" in finished.out and "round-update_policy" in finished.out
