"""Rows of one source, each with the place it came from. Knows file kinds, not what the columns mean.

JSON and CSV are read here, because a refusal must name the line; Parquet, Arrow and the hub go through `datasets`.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from configs.sources import FileSource
from stages.artifacts.errors import InputError
from stages.prepare_datasets.files import SourceFile, locate
from stages.prepare_datasets.kinds import open_unpacked, tell_kind

MAX_LINE_BYTES = 64 * 2**20
MAX_DOCUMENT_BYTES = 2**30
csv.field_size_limit(MAX_LINE_BYTES)


@dataclass(frozen=True)
class Row:
    """One row as the file holds it. line: from 1; of the file, or of its rows where it has no lines (unit "row")."""

    fields: dict[str, Any]
    file: SourceFile
    line: int
    unit: str = "line"

    @property
    def place(self) -> str:
        """Where it is, for the report: does not depend on where the source lies."""
        return f"{self.file.name}:{self.line}" if self.unit == "line" else f"{self.file.name}: row {self.line}"

    @property
    def where(self) -> str:
        """Where it is, for the person who has to fix it."""
        return f"{self.file.path}:{self.line}" if self.unit == "line" else f"{self.file.path}: row {self.line}"


def read_source(source: FileSource, *, role: str) -> Iterator[Row]:
    """The rows of a source one after another, in order of file name and line, `limit` at most. Raises InputError."""
    if source.hub:
        rows = _read_hub(source, role=role)
    else:
        rows = itertools.chain.from_iterable(_read_file(f, source) for f in locate(source, role=role))
    return itertools.islice(rows, source.limit)


def _read_file(file: SourceFile, source: FileSource) -> Iterator[Row]:
    kind = tell_kind(file.path)
    if kind in ("Parquet", "Arrow"):
        from stages.prepare_datasets.columnar import read_columnar

        for number, fields in enumerate(read_columnar(file.path, kind), start=1):
            yield Row(fields, file, number, "row")
        return
    with open_unpacked(file.path) as stream:
        if kind == "JSON Lines":
            yield from _read_lines(stream, file)
        elif kind == "CSV":
            yield from _read_csv(stream, file)
        else:
            yield from _read_document(stream, file, split=source.split)


def _read_hub(source: FileSource, *, role: str) -> Iterator[Row]:
    from stages.prepare_datasets.columnar import read_hub

    file = SourceFile(path=Path(f"hub:{source.path}@{source.revision or 'main'}"), name=f"{role}/hub:{source.path}")
    for number, fields in enumerate(read_hub(source), start=1):
        yield Row(fields, file, number, "row")


def _read_lines(stream: IO[bytes], file: SourceFile) -> Iterator[Row]:
    for number in itertools.count(1):
        line = stream.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        where = f"{file.path}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise InputError(f"{where}: expected lines of at most {MAX_LINE_BYTES} bytes, found a longer one")
        text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, where).strip()
        if not text:
            continue
        try:
            fields = parse_json(text)
        except ValueError as error:
            hint = "" if line.endswith(b"\n") else "; the last line has no end: was the file cut?"
            raise InputError(
                f"{where}: expected one JSON object per line, found {snippet(text)} ({error}){hint}; "
                "fix or remove the line"
            ) from None
        if not isinstance(fields, dict):
            raise InputError(
                f"{where}: expected a JSON object with named columns, found {json_type(fields)} {snippet(text)}"
            )
        yield Row(fields, file, number)


def _read_document(stream: IO[bytes], file: SourceFile, *, split: str) -> Iterator[Row]:
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise InputError(f"{file.path}: expected at most {MAX_DOCUMENT_BYTES} bytes of JSON; use JSON Lines or Parquet")
    text = _decode(data.removeprefix(b"\xef\xbb\xbf"), str(file.path)).strip()
    if not text:
        raise InputError(f"{file.path}: expected rows, found only blank lines")
    try:
        document = parse_json(text)
    except ValueError as error:
        if "Extra data" in str(error) and text.startswith("{"):
            yield from _read_lines(io.BytesIO(data), file)
            return
        raise InputError(f"{file.path}: expected a JSON array of rows, found broken JSON ({error})") from None
    for number, fields in enumerate(_array_in(document, file, split=split), start=1):
        if not isinstance(fields, dict):
            raise InputError(
                f"{file.path}: row {number}: expected an object with named columns, found {json_type(fields)}"
            )
        yield Row(fields, file, number, "row")


def _array_in(document: Any, file: SourceFile, *, split: str) -> list[Any]:
    if isinstance(document, list):
        return document
    if not isinstance(document, dict):
        raise InputError(f"{file.path}: expected a JSON array of rows, found {json_type(document)}")
    arrays = {key: value for key, value in document.items() if _is_rows(value)}
    if split in arrays:
        return list(arrays[split])
    if len(arrays) == 1:
        return list(next(iter(arrays.values())))
    found = f"arrays {sorted(arrays)}; name one of them as `split`" if arrays else f"keys {sorted(document)[:8]}"
    raise InputError(f"{file.path}: expected a JSON array of rows, or an object holding one, found {found}")


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _read_csv(stream: IO[bytes], file: SourceFile) -> Iterator[Row]:
    reader = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    header: list[str] | None = None
    try:
        for values in reader:
            if not values:
                continue
            if header is None:
                header = _header(values, file)
                continue
            if len(values) != len(header):
                raise InputError(
                    f"{file.path}:{reader.line_num}: expected {len(header)} values, one per column of the header, "
                    f"found {len(values)}; quote values that hold commas"
                )
            yield Row(dict(zip(header, values, strict=True)), file, reader.line_num)
    except csv.Error as error:
        raise InputError(f"{file.path}:{reader.line_num}: expected CSV, found {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file.path}: {_not_utf8(error)}") from None


def _header(values: list[str], file: SourceFile) -> list[str]:
    twice = sorted({name for name in values if values.count(name) > 1})
    if twice:
        raise InputError(f"{file.path}:1: expected distinct column names, found {twice} more than once")
    return values


def parse_json(text: str) -> Any:
    """JSON -> Python; NaN and infinities become null. Raises ValueError, also for repeated keys and deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return fields


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: {_not_utf8(error)}") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return (
        f"expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at offset {error.start}; "
        "convert the file to UTF-8"
    )


def json_type(value: Any) -> str:
    """The JSON word for a value's type."""
    if value is None:
        return "null"
    for kind, word in ((bool, "true/false"), (int | float, "a number"), (str, "a string"), (list, "an array")):
        if isinstance(value, kind):
            return word
    return "an object" if isinstance(value, dict) else type(value).__name__


def snippet(text: str, *, width: int = 60) -> str:
    """The beginning of a text, escaped so that it cannot forge a log line."""
    return ascii(text[:width]) + ("…" if len(text) > width else "")
