"""Encoded rows on disk until their order, doubles and part are known; in memory lie only numbers of them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.ipc

from stages.prepare_datasets.report import Tally
from stages.prepare_datasets.splits import Numbers

_ROWS_PER_BATCH = 4096
_BYTES_PER_STRETCH = 16 * 2**20
_MOST_STRETCHES = 256
_PLACE, _NUMBER = "place", "prompt_number"


class Spool:
    """The rows of one role: added in any order, doubles included; taken back in order of prompt_id, then of `texts`.

    schema: of the rows. texts: the columns whose equality makes a double. As a context it owns the new `directory`.
    """

    def __init__(self, directory: Path, schema: pa.Schema, *, texts: Sequence[str]) -> None:
        self._directory = directory
        self._schema = schema
        extra = [pa.field(_PLACE, pa.string(), nullable=False), pa.field(_NUMBER, pa.uint64(), nullable=False)]
        self._spooled = pa.schema([*schema, *extra])
        self._texts = tuple(texts)
        self._path = directory / "rows.arrow"
        self._pending: list[dict[str, Any]] = []
        self._bytes = 0
        self._numbers, self._held_out = array("Q"), bytearray()
        self._keys, self._answers = bytearray(), bytearray()
        self._lengths = {name: array("I") for name in schema.names if name.endswith("_ids")}
        self._kept: npt.NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def __enter__(self) -> Spool:
        self._directory.mkdir()
        self._stack = ExitStack()
        self._writer = self._open(self._path, self._stack)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        for path in self._directory.iterdir():
            path.unlink()
        self._directory.rmdir()

    @property
    def rows(self) -> int:
        """Rows added, doubles included."""
        return len(self._numbers)

    def add(self, fields: Mapping[str, Any], *, held_out: bool, place: str) -> None:
        """Take one row. place: where it is in its source."""
        number = int(fields["prompt_id"], 16)
        self._numbers.append(number)
        self._held_out.append(held_out)
        self._keys += _digest(*(fields[name] for name in self._texts))
        self._answers += _digest(fields.get("answer", ""))[:8]
        for name, lengths in self._lengths.items():
            lengths.append(len(fields[name]))
        self._pending.append({**fields, _PLACE: place, _NUMBER: number})
        if len(self._pending) == _ROWS_PER_BATCH:
            self._flush()

    def close(self, tally: Tally) -> None:
        """After the last row: of rows that say the same the first is kept, the others are counted."""
        self._flush()
        self._stack.close()
        first = _first_of_equals(np.frombuffer(self._keys, dtype=np.uint64).reshape(-1, 2))
        answers = np.frombuffer(self._answers, dtype=np.uint64)
        self._kept = first == np.arange(len(first))
        other = answers != answers[first]
        for reason, dropped in (("duplicate", ~self._kept & ~other), ("same prompt with another answer", other)):
            if dropped.any():
                tally.drop(reason, self._place_of(int(dropped.argmax())), rows=int(dropped.sum()))
        tally.kept = int(self._kept.sum())

    def assigned(self) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Of every kept row: its prompt_id as a number, and whether the hash of its prompt holds it out."""
        numbers = np.frombuffer(self._numbers, dtype=np.uint64)
        return numbers[self._kept], np.frombuffer(self._held_out, dtype=bool)[self._kept]

    def lengths(self) -> dict[str, list[int]]:
        """Of every kept row, the tokens in each column of ids."""
        return {name: np.asarray(counts)[self._kept].tolist() for name, counts in self._lengths.items()}

    def in_order(self, held_out: Numbers) -> Iterator[tuple[pa.Table, pa.Table]]:
        """The kept rows in order, some megabytes at a time: those for training, and those of prompts in `held_out`."""
        stretches = min(_MOST_STRETCHES, -(-self._bytes // _BYTES_PER_STRETCH))
        if stretches <= 1:
            yield self._split(list(self._kept_batches()), held_out)
            return
        for path in self._divide(stretches):
            with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
                yield self._split([reader.get_batch(i) for i in range(reader.num_record_batches)], held_out)
            path.unlink()

    def _split(self, batches: list[pa.RecordBatch], held_out: Numbers) -> tuple[pa.Table, pa.Table]:
        table = pa.Table.from_batches(batches, schema=self._spooled).combine_chunks()
        keys = [(name, "ascending") for name in ("prompt_id", *self._texts)]
        table = table.take(pa.compute.sort_indices(table, sort_keys=keys))
        is_held_out = np.isin(table[_NUMBER].to_numpy(), held_out)
        table = table.select(self._schema.names).cast(self._schema)
        return table.filter(pa.array(~is_held_out)), table.filter(pa.array(is_held_out))

    def _divide(self, stretches: int) -> list[Path]:
        """Share the kept rows out to files by their prompt_id, each file's all below the next one's."""
        paths = [self._directory / f"stretch-{index}.arrow" for index in range(stretches)]
        with ExitStack() as stack:
            writers = [self._open(path, stack) for path in paths]
            for batch in self._kept_batches():
                which = ((batch[_NUMBER].to_numpy() >> np.uint64(32)) * np.uint64(stretches)) >> np.uint64(32)
                for index in np.unique(which):
                    writers[int(index)].write_batch(batch.filter(pa.array(which == index)))
        return paths

    def _kept_batches(self) -> Iterator[pa.RecordBatch]:
        with pa.OSFile(str(self._path), "rb") as source, pa.ipc.open_file(source) as reader:
            for index in range(reader.num_record_batches):
                kept = self._kept[index * _ROWS_PER_BATCH : (index + 1) * _ROWS_PER_BATCH]
                yield reader.get_batch(index).filter(pa.array(kept))

    def _place_of(self, row: int) -> str:
        with pa.OSFile(str(self._path), "rb") as source, pa.ipc.open_file(source) as reader:
            place: str = reader.get_batch(row // _ROWS_PER_BATCH)[_PLACE][row % _ROWS_PER_BATCH].as_py()
        return place

    def _flush(self) -> None:
        if self._pending:
            batch = pa.RecordBatch.from_pylist(self._pending, schema=self._spooled)
            self._writer.write_batch(batch)
            self._bytes += batch.nbytes
            self._pending.clear()

    def _open(self, path: Path, stack: ExitStack) -> Any:
        sink = stack.enter_context(pa.OSFile(str(path), "wb"))
        return stack.enter_context(pa.ipc.new_file(sink, self._spooled))


def _digest(*texts: str) -> bytes:
    """16 bytes of what the texts say; other texts, or the same cut elsewhere, have others."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _first_of_equals(keys: Numbers) -> npt.NDArray[np.intp]:
    """For each row of keys [rows, 2] the index of the first row that equals it."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    in_order = keys[order]
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    starts = np.maximum.accumulate(np.where(is_new, np.arange(len(keys)), 0))
    first = np.empty(len(keys), dtype=np.intp)
    first[order] = order[starts]
    return first
