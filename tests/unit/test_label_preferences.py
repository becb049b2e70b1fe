"""Judged rollouts -> pairs: the largest gap first, distinct texts, EOS at the end, whatever the order of rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stages.artifacts import schemas, store
from stages.artifacts.errors import InputError
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.shards import read_rows, write_table
from stages.job import Job
from stages.label_preferences.job import Inputs, LabelPreferences, Parameters
from stages.label_preferences.run import eos_of, make_pairs, run
from stages.program import Context

EOS = 1


def _row(prompt: str, index: int, text: str, reward: float, finish: str = "stop") -> dict[str, Any]:
    return {
        "round_index": -1,
        "prompt_id": prompt,
        "sample_index": index,
        "group_id": f"-1/{prompt}",
        "policy_version": "v",
        "prompt_ids": [0, 9],
        "completion_ids": [ord(c) for c in text] + [EOS] * (finish == "stop"),
        "rollout_logprobs": [],
        "finish_reason": finish,
        "prompt": f"P{prompt}",
        "completion": text,
        "answer": "",
        "reward": reward,
    }


ROWS = [
    _row("a", 0, "x", 0.5),
    _row("a", 1, "y", 1.0),
    _row("a", 2, "z", 0.0),
    _row("a", 3, "y", 1.0),
    _row("b", 0, "x", 0.5),
    _row("b", 1, "y", 0.5),
    _row("c", 0, "x", 1.0, "length"),
    _row("c", 1, "y", 0.5),
]


def _texts(pairs: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(p["prompt_id"], p["chosen"], p["rejected"]) for p in pairs]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [("a", "y", "z")]),
        (2, [("a", "y", "z"), ("a", "x", "z")]),
        (9, [("a", "y", "z"), ("a", "x", "z"), ("a", "y", "x")]),
    ],
)
def test_largest_gap_first(limit: int, expected: list[tuple[str, str, str]]) -> None:
    pairs, without = make_pairs(ROWS, pairs_per_prompt=limit, eos=EOS)
    assert (_texts(pairs), without) == (expected, 2)
    assert all(p[k][-1] == EOS and p[k].count(EOS) == 1 for p in pairs for k in ("chosen_ids", "rejected_ids"))


def test_order_of_rows_does_not_matter() -> None:
    expected = make_pairs(ROWS, pairs_per_prompt=9, eos=EOS)
    for seed in range(20):
        shuffled = random.Random(seed).sample(ROWS, len(ROWS))
        assert make_pairs(shuffled, pairs_per_prompt=9, eos=EOS) == expected


def test_cut_completions_only_where_nothing_else_remains() -> None:
    pairs, without = make_pairs(ROWS[4:], pairs_per_prompt=2, eos=EOS)
    assert (_texts(pairs), without) == ([("c", "x", "y")], 1)
    assert pairs[0]["chosen_ids"] == [ord("x"), EOS]


def test_an_empty_completion_is_never_chosen() -> None:
    assert make_pairs([_row("a", 0, "", 1.0), _row("a", 1, "x", 0.0)], pairs_per_prompt=2, eos=EOS) == ([], 1)
    pairs, _ = make_pairs([_row("a", 0, "", 0.0), _row("a", 1, "x", 1.0)], pairs_per_prompt=2, eos=EOS)
    assert _texts(pairs) == [("a", "x", "")]


def test_eos_is_what_stopped_completions_end_in() -> None:
    assert eos_of(ROWS) == EOS
    with pytest.raises(InputError, match=r"all 1 cut by length; raise sampling\.max_completion_tokens"):
        eos_of([_row("a", 0, "x", 1.0, "length")])


class _Made(Job):
    STAGE: ClassVar[str] = "made_by_hand"
    VERSION: ClassVar[int] = 1
    name: str


def _commit(root: Path, name: str, kind: str, rows: list[dict[str, Any]]) -> ArtifactRef:
    job = _Made(store=root, seed=0, name=name)
    attempt = store.new_attempt(job)
    write_table(attempt / f"{kind}-00000.arrow", rows, schemas.ALL[kind])
    store.commit(job, attempt, metrics={}, wall_seconds=0.0)
    return job.ref


def _job(root: Path, rows: list[dict[str, Any]], held_out: list[dict[str, Any]], *, drop: int = 0) -> LabelPreferences:
    refs = {}
    for part, judged in (("train", rows), ("held_out", held_out)):
        rollouts = [{key: value for key, value in row.items() if key != "reward"} for row in judged]
        rewards = [
            {"prompt_id": r["prompt_id"], "sample_index": r["sample_index"], "source": s, "reward": r["reward"] * sign}
            for r in judged[drop:]
            for s, sign in (("rule", -1.0), ("total", 1.0))
        ]
        refs[f"rollouts_{part}"] = _commit(root, f"rollouts_{part}", "rollouts", rollouts)
        refs[f"rewards_{part}"] = _commit(root, f"rewards_{part}", "rewards", rewards)
    return LabelPreferences(store=root, seed=1, inputs=Inputs(**refs), parameters=Parameters(pairs_per_prompt=2))


def test_run_writes_both_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    seen: list[tuple[str, int, int]] = []
    job = _job(tmp_path / "store", ROWS, ROWS[:3])
    metrics = run(job, Context(out=out, report=lambda *progress: seen.append(progress)))
    assert metrics == {
        "pairs_train_rows": 2.0,
        "prompts_train_without_pair": 2.0,
        "pairs_held_out_rows": 2.0,
        "prompts_held_out_without_pair": 0.0,
    }
    assert _texts(read_rows(out, "pairs_train", schemas.PAIRS)) == [("a", "y", "z"), ("a", "x", "z")]
    assert seen[-1] == ("parts labelled", 2, 2)


@pytest.mark.parametrize(
    ("held_out", "drop", "words"),
    [
        (ROWS[4:6], 0, "at least one pair in the part held_out, found none among 2 completions of 1 prompts"),
        (ROWS, 1, "expected the same rows in both"),
        ([_row("a", 0, "x", float("nan"))], 0, "expected a finite total reward, found nan"),
    ],
)
def test_run_refuses(tmp_path: Path, held_out: list[dict[str, Any]], drop: int, words: str) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=words):
        run(_job(tmp_path / "store", ROWS, held_out, drop=drop), Context(out=tmp_path / "out"))
