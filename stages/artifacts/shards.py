"""Reading and writing Arrow *files* with a known schema. Knows nothing of what the rows mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from stages.artifacts import durable
from stages.artifacts.durable import replace, sync_file
from stages.artifacts.errors import InputError
from stages.artifacts.room import room_for

_ROWS_PER_BATCH = 4096


def write_table(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema) -> None:
    """Write `rows` as one Arrow file of bounded record batches, whole or not at all."""
    write_batches(path, record_batches(rows, schema), schema)


def record_batches(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> list[pa.RecordBatch]:
    """`rows` as record batches of bounded size. They share their dictionaries: a file holds one for each column."""
    batches: list[pa.RecordBatch] = pa.Table.from_pylist(list(rows), schema=schema).to_batches(_ROWS_PER_BATCH)
    return batches


def write_batches(path: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
    """Write record batches as one Arrow file, whole or not at all."""
    with _batch_writer(path, schema) as write:
        for batch in batches:
            write(batch)


@contextmanager
def table_writer(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], None]]:
    """What takes the rows of one Arrow file, some at a time. Once the context ends the file is there; after an error
    it is not. It is the same file, bit for bit, however the rows come.
    """
    pending = schema.empty_table()

    def batch_of(table: pa.Table) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.concat_arrays(column.chunks) for column in table.columns], schema=schema)

    def add(table: pa.Table) -> None:
        nonlocal pending
        pending = pa.concat_tables([pending, table])
        while pending.num_rows >= _ROWS_PER_BATCH:
            write(batch_of(pending.slice(0, _ROWS_PER_BATCH)))
            pending = pending.slice(_ROWS_PER_BATCH)

    with _batch_writer(path, schema) as write:
        yield add
        if pending.num_rows:
            write(batch_of(pending))


@contextmanager
def _batch_writer(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.RecordBatch], None]]:
    temporary = path.with_name(f".{path.name}.tmp")
    durable.before_operation("write", path)
    with (
        room_for(path),
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        yield writer.write_batch
    sync_file(temporary)
    replace(temporary, path)


def read_table(path: Path, schema: pa.Schema, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the named columns of one Arrow file. Raises InputError if its schema is not the expected one."""
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
        expected, found = schema.metadata or {}, reader.schema.metadata or {}
        for key in (b"ratchet.schema", b"ratchet.version"):
            if found.get(key) != expected.get(key):
                raise InputError(
                    f"{path}: expected {key.decode()} {(expected.get(key) or b'none').decode()}, "
                    f"found {(found.get(key) or b'none').decode()}"
                )
        table = reader.read_all()
    return table.select(list(columns)) if columns is not None else table


def read_rows(
    directory: Path, kind: str, schema: pa.Schema, *, columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """All rows of the `kind-NNNNN.arrow` files of an artifact, in file order."""
    rows: list[dict[str, Any]] = read_tables(directory, kind, schema, columns=columns).to_pylist()
    return rows


def read_tables(directory: Path, kind: str, schema: pa.Schema, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The `kind-NNNNN.arrow` files of an artifact as one table, in file order. Raises InputError if there is none."""
    paths = sorted(directory.glob(f"{kind}-?????.arrow"))
    if not paths:
        raise InputError(f"{directory}: expected {kind}-00000.arrow and so on, found none")
    return pa.concat_tables([read_table(path, schema, columns=columns) for path in paths])


def by_key(rows: Sequence[dict[str, Any]], *, where: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows by (prompt_id, sample_index). Raises InputError naming a key that occurs twice."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        key = (row["prompt_id"], row["sample_index"])
        if key in found:
            raise InputError(f"{where}: row {key} occurs twice; expected each (prompt_id, sample_index) once")
        found[key] = row
    return found


def same_keys(left: dict[Any, Any], right: dict[Any, Any], *, left_name: str, right_name: str) -> None:
    """Raise InputError unless two files hold exactly the same rows."""
    for key in sorted(left.keys() ^ right.keys()):
        here, there = (left_name, right_name) if key in left else (right_name, left_name)
        raise InputError(f"row {key} is in {here} but not in {there}; expected the same rows in both")
