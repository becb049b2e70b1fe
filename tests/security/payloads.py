"""Files that would run code if anybody opened them without care: each only makes a canary file."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch

TEMPLATE = "{{ cycler.__init__.__globals__.os.mkdir(%r) }}"


class Canary:
    """Unpickled, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def pickled_canary(canary: Path) -> bytes:
    """A pickle."""
    return pickle.dumps(Canary(canary))


def torch_file(canary: Path) -> bytes:
    """What torch.save writes: a zip archive around a pickle."""
    buffer = io.BytesIO()
    torch.save({"state": Canary(canary)}, buffer)
    return buffer.getvalue()


def object_array(canary: Path) -> bytes:
    """A .npy file of objects, which holds a pickle."""
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.array([Canary(canary)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _extension_table(canary: Path) -> Any:
    """Rows whose column claims to be of a Python class of its own, pickled in the metadata."""
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickled_canary(canary),
    }
    schema = pyarrow.schema([pyarrow.field("prompt", pyarrow.string(), metadata=metadata)])
    return pyarrow.table({"prompt": [f"Say {i}." for i in range(20)]}, schema=schema)


def arrow_extension(canary: Path) -> bytes:
    """An Arrow file with such a column."""
    table, sink = _extension_table(canary), io.BytesIO()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def pandas_metadata(canary: Path) -> bytes:
    """A Parquet file with such a column, and metadata that tell pandas to make Python objects of it."""
    pandas = {"index_columns": [{"kind": "serialized"}], "columns": [{"name": "prompt", "pandas_type": "object"}]}
    return _parquet(canary, {b"pandas": json.dumps(pandas).encode()})


def datasets_metadata(canary: Path) -> bytes:
    """A Parquet file with such a column, and a pickle where `datasets` looks for JSON."""
    return _parquet(canary, {b"huggingface": pickled_canary(canary)})


def _parquet(canary: Path, metadata: dict[bytes, bytes]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(_extension_table(canary).replace_schema_metadata(metadata), sink)
    return sink.getvalue()
