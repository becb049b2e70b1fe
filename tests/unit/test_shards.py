"""Arrow files of many record batches: their columns of words share one dictionary, whatever each batch holds."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from stages.artifacts.shards import read_rows, write_table

SCHEMA = pa.schema(
    [("index", pa.int32()), ("word", pa.dictionary(pa.int8(), pa.string())), ("ids", pa.list_(pa.int32()))]
)


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 9600])
def test_rows_come_back_as_they_were_however_many_batches_they_fill(tmp_path: Path, count: int) -> None:
    """Each batch of 4,096 brings words that the ones before it do not have."""
    rows = [{"index": i, "word": f"{i // 4096}-{i % 3}", "ids": list(range(i % 5))} for i in range(count)]
    write_table(tmp_path / "rows-00000.arrow", rows, SCHEMA)
    assert read_rows(tmp_path, "rows", SCHEMA) == rows
    with pa.OSFile(str(tmp_path / "rows-00000.arrow")) as source:
        assert pa.ipc.open_file(source).num_record_batches == -(-count // 4096)
