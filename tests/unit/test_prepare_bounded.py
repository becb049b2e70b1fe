"""prepare_datasets with many rows: memory does not grow with them, and cutting them up changes no order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.prepare_datasets import spool
from tests.unit.prepare_jobs import files, json_lines, prepare

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES_PER_ROW = 1300
"""Most of it is what stops growing: the tokenizer's sample of texts and one stretch. 1,870 when rows were held."""


def test_peak_memory_does_not_hold_the_rows(tmp_path: Path) -> None:
    few, many = 4_000, 44_000
    code = (
        "import json; from pathlib import Path; from bench.store_work import prepare; "
        f"place = Path({str(tmp_path)!r}); "
        f"peaks = [prepare(place / str(n), n)['peak_rss_bytes'] for n in ({few}, {many})]; print(json.dumps(peaks))"
    )
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = json.loads(made.stdout.splitlines()[-1])
    assert second - first < MOST_BYTES_PER_ROW * (many - few), (first, second)


def test_rows_cut_into_stretches_come_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    rows = [{"prompt": f"Q{i % 400}", "completion": f"A{i % 900}"} for i in range(6000)]
    path.write_bytes(json_lines(rows))

    def made() -> tuple[dict[str, Any], list[bytes]]:
        prepared = prepare(tmp_path, demonstrations=files(path))
        assert not [p for p in prepared.out.iterdir() if p.name.startswith(".")]
        return prepared.report, [p.read_bytes() for p in sorted(prepared.out.glob("*.arrow"))]

    whole = made()
    monkeypatch.setattr(spool, "_BYTES_PER_STRETCH", 10_000)
    assert made() == whole
    distinct = {(row["prompt"], row["completion"]) for row in rows}
    assert whole[0]["demonstrations"]["rows_kept"] == len(distinct)
    dropped = whole[0]["demonstrations"]["rows_dropped"]["duplicate"]
    assert dropped == {"rows": 6000 - len(distinct), "first": "demonstrations/d.jsonl:3601"}
