"""The `columns` setting: a column name or a template over columns -> the value of one field of a row.

A template can name columns and nothing else: no attribute, no index, no conversion, no format width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

from stages.artifacts.errors import InputError
from stages.prepare_datasets.dialogues import BadRow


class Field:
    """One compiled entry of `columns`. Raises InputError for a column that no row has, listing those found."""

    def __init__(self, name: str, spec: str, *, known: list[str], where: str) -> None:
        self.name = name
        self._column = spec if spec in known else None
        self._pieces: list[tuple[str, str | None]] = []
        if self._column is not None:
            return
        if "{" not in spec:
            raise _unknown(name, spec, known, where)
        try:
            parsed = list(Formatter().parse(spec))
        except ValueError as error:
            raise InputError(f"columns.{name}: {spec!r} is not a template ({error}); write {{column}}") from None
        for literal, column, width, conversion in parsed:
            if column is not None and (width or conversion):
                raise InputError(f"columns.{name}: {spec!r}: expected plain {{column}}, found a format or conversion")
            if column is not None and column not in known:
                raise _unknown(name, column, known, where)
            self._pieces.append((literal, column))

    def value(self, fields: Mapping[str, Any]) -> Any:
        """The column's own value, or the filled-in template. Raises BadRow where the row lacks a column."""
        if self._column is not None:
            return fields.get(self._column)
        return "".join(text + (_plain(column, fields) if column is not None else "") for text, column in self._pieces)


def text_of(value: Any, *, field: str) -> str:
    """A text that must be a string, or a number where a number can stand for one. Raises BadRow."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_text(value)
    raise BadRow(f"expected a string as {field}", "null" if value is None else ascii(value)[:60])


def number_text(value: int | float) -> str:
    """A number as people write it: 51.0 is 51."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _plain(column: str, fields: Mapping[str, Any]) -> str:
    value = fields.get(column)
    if value is None:
        raise BadRow(f"expected a value in column {column}", "null")
    if isinstance(value, list | dict | bool):
        return json.dumps(value, ensure_ascii=False, default=str)
    return text_of(value, field=column)


def _unknown(name: str, column: str, known: list[str], where: str) -> InputError:
    return InputError(f"columns.{name}: expected a column of {where}, found {column!r}; it has {known}")
