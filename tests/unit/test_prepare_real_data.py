"""prepare_datasets on the real data beside the checkout: rows kept, and rows dropped by reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.artifacts.errors import InputError
from tests.unit.prepare_jobs import REAL_DATA, files, prepare

BIG: dict[str, Any] = {"max_prompt_tokens": 4000, "max_completion_tokens": 4000, "held_out_fraction": 0.1}
COUNTDOWN = {"prompt": "Make {target} from {nums}.", "completion": "solution", "answer": "{target}"}
REAL: list[tuple[str, str, dict[str, Any], str, int, dict[str, int]]] = [
    ("gsm8k", "gsm8k/test_visible.jsonl", {}, "prompts", 658, {}),
    ("gsm8k solutions", "gsm8k/test_visible.jsonl", {}, "demonstrations", 658, {}),
    ("svamp", "svamp", {"columns": {"prompt": "{Body} {Question}", "answer": "Answer"}}, "prompts", 704, {}),
    ("countdown", "countdown_synthetic", {"columns": COUNTDOWN, "limit": 3000}, "demonstrations", 3000, {}),
    ("sgd", "sgd_dialogue_corpus/*.gz", {"limit": 400}, "demonstrations", 400, {}),
    ("hh", "hh_rlhf_harmless", {}, "preferences", 1836,
     {"chosen and rejected differ before their last replies": 3, "empty chosen": 3}),
    ("pandalm", "pandalm_human", {}, "preferences", 604,
     {"duplicate": 67, "empty chosen": 1, "empty rejected": 28, "expected a string as response": 6,
      "no majority among the annotators": 83}),
]  # fmt: skip


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize("case", REAL, ids=[case[0] for case in REAL])
def test_real_data(tmp_path: Path, case: tuple[str, str, dict[str, Any], str, int, dict[str, int]]) -> None:
    _, path, more, role, kept, dropped = case
    prepared = prepare(tmp_path, **{**BIG, role: files(REAL_DATA / path, **more)})
    kind = "pairs" if role == "preferences" else role
    rows = prepared.rows(kind)
    assert (len(rows), prepared.dropped(kind)) == (kept, dropped)
    for row in rows:
        assert row["prompt_ids"][0] == 0 and 0 not in row["prompt_ids"][1:]
        for name in ("completion_ids", "chosen_ids", "rejected_ids"):
            assert row.get(name, [1])[-1] == 1 and row.get(name, [1]).count(1) == 1


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("sentiment_polarity", "expected a .jsonl"),
        ("sentiment_polarity/sentence_polarity.zip", "a zip archive"),
        ("tinyshakespeare/input.txt", "no known kind"),
        ("oasst_trees", "expected a string as prompt"),
    ],
)
def test_real_data_that_is_not_rows(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        prepare(tmp_path, prompts=files(REAL_DATA / path))
