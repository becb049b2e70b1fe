"""The stage score_rollouts: rules and the reward model, normalising, clipping, the total, and its gates."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from configs.rewards import FunctionSource, RewardModelSource, RewardSource, VerifierSource
from stages.artifacts.durable import write_json
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.schemas import REWARDS
from stages.artifacts.shards import read_rows, read_table
from stages.program import Context
from stages.rewards.code import code_digest
from stages.score_rollouts.job import Inputs, Parameters, ScoreRollouts
from stages.score_rollouts.run import run
from tests.unit.stage_artifacts import Row, commit_files, commit_rollouts, rollout, run_stage

EXACT = VerifierSource(verifier="exact_match")
NUMBERS = {"score_mean": 0.25, "score_std": 0.5}


def some_rollouts() -> list[Row]:
    return [
        rollout("b", 0, tokens=4, completion="1259", answer="1259"),
        rollout("a", 1, tokens=1, completion="12", answer="12", finish_reason="length"),
        rollout("a", 0, tokens=2, completion="21", answer="12"),
    ]


def job(
    store: Path,
    *sources: RewardSource,
    rows: list[Row] | None = None,
    reward_model: ArtifactRef | None = None,
    code: dict[str, str] | None = None,
) -> ScoreRollouts:
    rows = some_rollouts() if rows is None else rows
    return ScoreRollouts(
        store=store,
        seed=1,
        inputs=Inputs(rollouts=commit_rollouts(store, rows, shards=2), reward_model=reward_model),
        parameters=Parameters(sources=sources, code=code or {}, dtype="float32", max_tokens_per_microbatch=16),
    )


def rewards_of(directory: Path) -> dict[tuple[str, int, str], float]:
    rows = read_rows(directory, "rewards", REWARDS)
    return {(row["prompt_id"], row["sample_index"], row["source"]): row["reward"] for row in rows}


def commit_reward_model(store: Path, statistics: dict[str, Any]) -> ArtifactRef:
    def write(out: Path) -> None:
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=1,
            pad_token_id=0,
        )
        LlamaForSequenceClassification(config).save_pretrained(out / "reward_model")
        write_json(out / "reward_model.json", statistics)

    return commit_files(store, "train_reward_model", write, content=repr(statistics))


def test_each_source_and_the_weighted_total(tmp_path: Path) -> None:
    place = VerifierSource(verifier="position_match", name="place", weight=0.5)
    directory, metrics = run_stage(run, job(tmp_path, EXACT, place))
    assert rewards_of(directory) == {
        ("a", 0, "exact_match"): 0.0,
        ("a", 0, "place"): 0.0,
        ("a", 0, "total"): 0.0,
        ("a", 1, "exact_match"): 1.0,
        ("a", 1, "place"): 1.0,
        ("a", 1, "total"): 1.5,
        ("b", 0, "exact_match"): 1.0,
        ("b", 0, "place"): 1.0,
        ("b", 0, "total"): 1.5,
    }
    files = [read_table(path, REWARDS).to_pylist() for path in sorted(directory.glob("rewards-*.arrow"))]
    assert len(files) == 2  # as many as there are of rollouts
    for rows in files:
        keys = [(row["prompt_id"], row["sample_index"], row["source"]) for row in rows]
        assert keys == sorted(keys)  # canonical order, total last
    assert metrics["total_mean"] == 1.0 and metrics["exact_match_mean"] == pytest.approx(2 / 3)
    assert metrics["exact_match_std"] == pytest.approx(math.sqrt(2 / 9))


def test_the_total_can_be_checked_from_the_file_alone(tmp_path: Path) -> None:
    sources = (
        VerifierSource(verifier="length", name="x", weight=0.1, options={"max": 3}),
        VerifierSource(verifier="length", name="y", weight=-0.7, options={"target": 7}),
    )
    found = rewards_of(run_stage(run, job(tmp_path, *sources))[0])
    for prompt_id, sample_index in (("a", 0), ("a", 1), ("b", 0)):
        x, y, total = (found[prompt_id, sample_index, name] for name in ("x", "y", "total"))
        assert total == torch.tensor(math.fsum([0.1 * x, -0.7 * y]), dtype=torch.float64).float().item()


def test_a_users_function_and_its_planned_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_score_rule.py").write_text("def rate(*, prompt, completion, answer):\n    return len(completion) * 2\n")
    source = FunctionSource(function="my_score_rule:rate", name="mine")
    code = {"mine": code_digest("my_score_rule:rate")}
    found = rewards_of(run_stage(run, job(tmp_path, source, code=code))[0])
    assert [found["a", 0, "mine"], found["b", 0, "total"]] == [4.0, 8.0]
    with pytest.raises(InputError, match="expected the code that the run was planned with"):
        run_stage(run, job(tmp_path, source, code={"mine": "0" * 64}))


def test_a_nan_is_refused_with_the_rollouts_name_and_nothing_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("nan_rule.py").write_text("def rate(*, prompt, completion, answer):\n    return float('nan')\n")
    scoring = job(tmp_path, EXACT, FunctionSource(function="nan_rule:rate", name="mine"))
    with pytest.raises(GateError, match="'mine', prompt_id a: expected a finite number as reward, found nan"):
        run_stage(run, scoring)
    assert not scoring.ref.path(tmp_path).exists()


def test_a_total_beyond_float32_is_refused(tmp_path: Path) -> None:
    heavy = VerifierSource(verifier="exact_match", name="heavy", weight=1e39)
    message = "reward source 'total': expected finite rewards, found inf for prompt_id b, sample_index 0"
    with pytest.raises(GateError, match=message):
        run_stage(run, job(tmp_path, heavy))


def plain_scores(store: Path, reference: ArtifactRef) -> dict[tuple[str, int], float]:
    """The model's scores one by one, by transformers alone."""
    model = LlamaForSequenceClassification.from_pretrained(reference.path(store) / "reward_model").eval()
    scores = {}
    for row in some_rollouts():
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
            scores[row["prompt_id"], row["sample_index"]] = model.score(hidden)[0, -1, 0].item()
    return scores


def test_the_reward_model_scores_whole_sequences(tmp_path: Path) -> None:
    reference = commit_reward_model(tmp_path, NUMBERS)
    raw = plain_scores(tmp_path, reference)
    assert len(set(raw.values())) == 3
    live: dict[Any, Any] = {}
    sources = (RewardModelSource(name="raw", normalize=False), RewardModelSource(name="z"))
    scoring = job(tmp_path, *sources, RewardModelSource(name="cut", clip=0.5), reward_model=reference)
    found = rewards_of(run_stage(run, scoring, live=live)[0])
    for (prompt_id, sample_index), score in raw.items():
        z = (score - 0.25) / 0.5
        assert found[prompt_id, sample_index, "raw"] == pytest.approx(score, abs=1e-6)
        assert found[prompt_id, sample_index, "z"] == pytest.approx(z, abs=1e-5)
        assert found[prompt_id, sample_index, "cut"] == pytest.approx(min(0.5, max(-0.5, z)), abs=1e-5)
    assert min(found.values()) < -0.5  # the clip acted
    assert set(live) == {("reward_model", reference.fingerprint)}


def test_a_warm_reward_model_is_used_again_and_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = commit_reward_model(tmp_path, NUMBERS)
    live: dict[Any, Any] = {("reward_model", "another"): object()}
    scoring = job(tmp_path, RewardModelSource(), reward_model=reference)
    cold, metrics = run_stage(run, scoring, live=live)
    assert list(live) == [("reward_model", reference.fingerprint)]  # the other model made room
    monkeypatch.setattr("stages.models.scalar.load_scalar_model", lambda *a, **k: pytest.fail("loaded again"))
    out = tmp_path / "again"
    out.mkdir()
    assert run(scoring, Context(out=out, live=live)) == metrics
    name = "rewards-00000.arrow"
    assert (out / name).read_bytes() == (cold / name).read_bytes()


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({}, "expected finite score_mean and score_std, found None and None"),
        ({"score_mean": 0.0, "score_std": 0.0}, "expected score_std above 0, found 0.0"),
    ],
)
def test_useless_statistics_are_refused(tmp_path: Path, statistics: dict[str, float], message: str) -> None:
    reference = commit_reward_model(tmp_path, statistics)
    with pytest.raises(GateError, match=f"reward_model.json: {message}"):
        run_stage(run, job(tmp_path, RewardModelSource(), reward_model=reference))


def test_what_the_job_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="reward source 'reward_model': expected the job to name a reward model"):
        run_stage(run, job(tmp_path, RewardModelSource()))
    with pytest.raises(InputError, match="unknown option 'strict'"):
        run_stage(run, job(tmp_path, VerifierSource(verifier="exact_match", options={"strict": True})))
    with pytest.raises(InputError, match=r"row \('a', 0\) occurs twice"):
        run_stage(run, job(tmp_path, EXACT, rows=[rollout("a", 0), rollout("a", 0)]))
    with pytest.raises(GateError, match="expected rollouts, found none"):
        run_stage(run, job(tmp_path, EXACT, rows=[]))


def test_only_rank_0_writes(tmp_path: Path) -> None:
    assert run(job(tmp_path, EXACT), Context(out=tmp_path / "out", rank=1, world_size=2)) == {}
    assert not (tmp_path / "out").exists()
