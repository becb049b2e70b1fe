"""Parquet, Arrow and hub rows through `datasets`, streamed as tables so that nothing inside is ever decoded or run."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from configs.sources import FileSource
from stages.artifacts.errors import InputError

_BATCH_ROWS = 1024
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_columnar(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Rows of one Parquet or Arrow file (file or stream format). Raises InputError if it is cut or damaged."""
    _refuse_cut(path, kind)
    loader = "parquet" if kind == "Parquet" else "arrow"
    try:
        rows = datasets.load_dataset(
            loader, data_files=[glob.escape(str(path.resolve()))], split="train", streaming=True
        )
        yield from _rows(rows)
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise InputError(f"{path}: expected {kind}, found it damaged ({reason}); fetch or write it again") from None


def read_hub(source: FileSource) -> Iterator[dict[str, Any]]:
    """Rows of a data set on the hub (no loading scripts). Raises InputError if it cannot be had."""
    try:
        rows = datasets.load_dataset(source.path, split=source.split, revision=source.revision)
        yield from _rows(rows)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"hub:{source.path}: expected a data set with split {source.split!r}, found {reason} "
            f"({type(error).__name__}); check the id, split and revision, and that the hub can be reached"
        ) from None


def _rows(rows: Any) -> Iterator[dict[str, Any]]:
    for table in rows.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield from table.to_pylist()


def _refuse_cut(path: Path, kind: str) -> None:
    """An Arrow stream cut between two batches reads short without an error, so its end is looked at."""
    with path.open("rb") as file:
        stream = kind == "Arrow" and file.read(6) != b"ARROW1"
        file.seek(max(0, os.path.getsize(path) - 8))
        tail = file.read()
    if (stream and tail != _END_OF_STREAM) or (kind == "Parquet" and not tail.endswith((b"PAR1", b"PARE"))):
        raise InputError(f"{path}: expected {kind} up to its end mark, found none: the file was cut; fetch it again")
