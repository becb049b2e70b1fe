"""The same forty rows as files and folders of every kind, whole and cut."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.unit.prepare_jobs import json_lines

GOOD: list[dict[str, Any]] = [{"prompt": f"Question {i}?", "completion": f"Answer {i}."} for i in range(40)]
TABLE = pa.Table.from_pylist(GOOD)


def one_more(row: Any, *, at: int = 2) -> bytes:
    """GOOD with one more row as line at + 1."""
    return json_lines([*GOOD[:at], row, *GOOD[at:]])


def csv_file(rows: str = "") -> bytes:
    return ("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in GOOD) + rows).encode()


def parquet_file(table: pa.Table = TABLE) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def arrow_file(*, stream: bool = False, batches: int = 1) -> bytes:
    sink = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=40 // batches)
    return sink.getvalue()


def stream_cut_between_batches() -> bytes:
    whole = arrow_file(stream=True, batches=4)
    reader = io.BytesIO(whole)
    with pa.ipc.open_stream(reader) as batches:
        batches.read_next_batch()
        return whole[: reader.tell()]


def mixed_folder(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_bytes(json_lines(GOOD[:20]))
    (path / "b.jsonl").write_bytes(json_lines([{"text": "x"}] * 20))
    (path / "README.md").write_text("not data")


def mixed_kinds_folder(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_bytes(json_lines(GOOD[:20]))
    (path / "sub").mkdir()
    (path / "sub" / "b.parquet").write_bytes(parquet_file(TABLE.slice(20)))


def folder(path: Path) -> None:
    path.mkdir()
    (path / "data.jsonl").write_bytes(json_lines(GOOD))


def loop(path: Path) -> None:
    path.symlink_to(path)
