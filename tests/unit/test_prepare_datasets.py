"""prepare_datasets as a whole: splits, digests, the embedded task, the report, and the same bits twice."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.sources import DataConfig, SortDigitsSource
from stages.artifacts.errors import InputError
from stages.prepare_datasets.digests import source_digests
from stages.prepare_datasets.digits import sort_digits
from stages.prepare_datasets.report import lengths
from stages.prepare_datasets.run import run
from stages.prepare_datasets.shapes import final_answer
from stages.prepare_datasets.splits import is_held_out, prompt_id_of, settled
from stages.program import Context
from tests.unit.prepare_jobs import DIGITS, files, json_lines, prepare, prepare_job

N = 30


def _write(tmp_path: Path, make: Any, name: str = "a.jsonl") -> dict[str, Any]:
    path = tmp_path / name
    path.write_bytes(json_lines([make(i) for i in range(N)]))
    return files(path)


def test_same_prompt_with_another_answer_keeps_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"Q{i}", "answer": str(i)} for i in range(N)]
    path.write_bytes(json_lines([*rows, {"prompt": "Q3", "answer": "other"}, rows[4]]))
    prepared = prepare(tmp_path, prompts=files(path))
    assert prepared.dropped("prompts") == {"same prompt with another answer": 1, "duplicate": 1}
    assert {row["answer"] for row in prepared.rows("prompts") if row["prompt"] == "Q3"} == {"3"}
    first = prepared.report["prompts"]["rows_dropped"]["duplicate"]["first"]
    assert first == f"prompts/a.jsonl:{N + 2}"


def test_overlong_prompts_are_cut_on_the_left(tmp_path: Path) -> None:
    source = _write(tmp_path, lambda i: {"prompt": "far " * 50 + f"near {i}"})
    rows = prepare(tmp_path, prompts=source, overlong="truncate_left", max_prompt_tokens=8).rows("prompts")
    assert len(rows) == N
    for row in rows:
        assert len(row["prompt_ids"]) <= 8 and row["prompt_ids"][0] == 0
        assert "near" in row["prompt"] and row["prompt_id"] == prompt_id_of(row["prompt"])


def test_everything_dropped_is_refused_with_reasons(tmp_path: Path) -> None:
    source = _write(tmp_path, lambda i: {"prompt": "far " * 50 + str(i)})
    with pytest.raises(
        InputError, match=r"found none of 30: 30 prompt over max_prompt_tokens \(first: prompts/a\.jsonl:1\)"
    ):
        prepare(tmp_path, prompts=source, max_prompt_tokens=4)


def test_limit_and_order_of_files(tmp_path: Path) -> None:
    for name, start in (("b.jsonl", 20), ("a.jsonl", 0)):
        (tmp_path / name).write_bytes(json_lines([{"prompt": f"Q{i}"} for i in range(start, start + 20)]))
    prepared = prepare(tmp_path, prompts=files(f"{tmp_path}/*.jsonl", limit=30))
    assert {row["prompt"] for row in prepared.rows("prompts")} == {f"Q{i}" for i in range(30)}


def test_no_prompt_is_in_both_parts_in_any_role(tmp_path: Path) -> None:
    demonstrations = _write(tmp_path, lambda i: {"prompt": f"Q{i % 20}", "completion": f"A{i}"}, "d.jsonl")
    preferences = _write(tmp_path, lambda i: {"prompt": f"Q{i}", "chosen": "y", "rejected": "n"}, "p.jsonl")
    prompts = _write(tmp_path, lambda i: {"prompt": f"Q{i}"}, "q.jsonl")
    prepared = prepare(tmp_path, prompts=prompts, demonstrations=demonstrations, preferences=preferences)
    parts = {
        part: {row["prompt"] for kind in ("prompts", "demonstrations", "pairs") for row in prepared.rows(kind, part)}
        for part in ("train", "held_out")
    }
    assert not parts["train"] & parts["held_out"]
    assert parts["train"] | parts["held_out"] == {f"Q{i}" for i in range(N)}


def test_held_out_share_and_settlement() -> None:
    share = sum(is_held_out(f"prompt {i}", fraction=0.1) for i in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01
    assert is_held_out(" x\n", fraction=0.5) == is_held_out("x", fraction=0.5)
    roles = [
        (np.array([1, 2], np.uint64), np.array([True, True])),
        (np.array([2, 3], np.uint64), np.array([False] * 2)),
    ]
    assert settled(roles).tolist() == [1]


def test_rows_are_sorted_and_metrics_count_them(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, demonstrations=DIGITS)
    for kind in ("prompts", "demonstrations"):
        for part in ("train", "held_out"):
            rows = prepared.rows(kind, part)
            assert [r["prompt_id"] for r in rows] == sorted(r["prompt_id"] for r in rows)
            assert prepared.metrics[f"{kind}_{part}_rows"] == len(rows)
    assert sum(prepared.report["prompts"]["splits"].values()) == 64
    assert set(prepared.report["prompts"]["tokens"]["prompt_ids"]) == {"p5", "p50", "p95", "p99", "max"}


def test_percentiles_by_nearest_rank() -> None:
    assert lengths(range(1, 101)) == {"p5": 5, "p50": 50, "p95": 95, "p99": 99, "max": 100}
    assert lengths([7]) == {"p5": 7, "p50": 7, "p95": 7, "p99": 7, "max": 7} and lengths([]) == {}


def test_final_answer() -> None:
    assert [final_answer(t) for t in ("a\n#### 1,234 ", " 7 ", "#### x #### y")] == ["1234", "7", "y"]


def test_sort_digits() -> None:
    source = SortDigitsSource(rows=1000, min_digits=1, max_digits=8, lazy_fraction=0.5)
    made = list(sort_digits(source, run_seed=3, role="demonstrations"))
    assert made == list(sort_digits(source, run_seed=3, role="demonstrations"))
    assert made != list(sort_digits(source, run_seed=4, role="prompts"))
    assert len({r.prompt.text for r in made}) == 1000
    lazy = 0
    for record in made:
        digits = record.prompt.text.removeprefix("Sort the digits ").removesuffix(".")
        assert record.answer == "".join(sorted(digits)) and record.completion in (record.answer, record.answer[:-1])
        lazy += record.completion != record.answer
    assert 400 < lazy < 600
    with pytest.raises(InputError, match="at most 10 rows with 1 to 1 digits, found rows: 16"):
        next(sort_digits(SortDigitsSource(rows=16, min_digits=1, max_digits=1), run_seed=1, role="prompts"))


def _digest(out: Path) -> dict[str, str]:
    paths = sorted(p for p in out.rglob("*") if p.is_file())
    return {p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def test_same_bits_wherever_the_source_lies(tmp_path: Path) -> None:
    found = []
    for place in ("one", "two/three"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        source = _write(folder, lambda i: {"prompt": f"Q{i}", "completion": "" if i == 3 else f"A{i}"})
        job = prepare_job(tmp_path, prompts=source, demonstrations=source)
        out = folder / "out"
        out.mkdir()
        run(job, Context(out=out))
        found.append((job.fingerprint, _digest(out)))
    assert found[0] == found[1]
    assert {"report.json", "tokenizer/tokenizer.json", "prompts_train-00000.arrow"} <= found[0][1].keys()


def test_digests_follow_the_content(tmp_path: Path) -> None:
    source = _write(tmp_path, lambda i: {"prompt": f"Q{i}"})
    config = DataConfig.model_validate({"prompts": source, "held_out_fraction": 0.3})
    cache = tmp_path / "cache" / "digests.json"
    first = source_digests(config, cache)
    content = Path(source["path"]).read_bytes()
    assert first == {"prompts/a.jsonl": hashlib.sha256(content).hexdigest()} == source_digests(config, cache)
    job = prepare_job(tmp_path, prompts=source)
    Path(source["path"]).write_bytes(content + b"\n")
    assert source_digests(config, cache) != first
    with pytest.raises(InputError, match=r"prompts/a\.jsonl: expected the file that this run was planned with"):
        run(job, Context(out=tmp_path))
    cache.write_text("broken")
    assert source_digests(config, cache) == source_digests(config, None)
    assert prepare_job(tmp_path, prompts=source).fingerprint != job.fingerprint


def test_digests_of_a_hub_source_need_no_network() -> None:
    config = DataConfig.model_validate({"prompts": files("org/name", hub=True, revision="v1")})
    assert source_digests(config, None) == {"prompts/hub:org/name@v1": "hub:org/name@v1"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    source = _write(tmp_path, lambda i: {"prompt": f"Q{i}"})
    Path(source["path"]).chmod(0)
    with pytest.raises(InputError, match="permission denied"):
        source_digests(DataConfig.model_validate({"prompts": source}), None)


@pytest.mark.parametrize("module", ["digests", "job", "records"])
def test_refusals_do_not_wait_for_heavy_libraries(module: str) -> None:
    heavy = ("torch", "transformers", "datasets", "prefect", "tokenizers")
    code = f"import sys, stages.prepare_datasets.{module}; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    made = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
