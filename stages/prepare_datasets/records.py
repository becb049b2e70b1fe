"""All records of one role, whichever source they come from; refuses a source with too many bad rows.

Records are read anew each time somebody goes through them, so that no source is ever held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from configs.sources import DataConfig, FileSource, SortDigitsSource
from stages.artifacts.errors import InputError
from stages.prepare_datasets.dialogues import BadRow
from stages.prepare_datasets.digits import sort_digits
from stages.prepare_datasets.readers import Row, read_source
from stages.prepare_datasets.report import Tally
from stages.prepare_datasets.shapes import NEEDED, Parser, Record, Tie, parser_for

MAX_BAD_FRACTION = 0.05
ROLES = ("prompts", "demonstrations", "preferences")
SAMPLE_CHARACTERS = 4_000_000
_CHARACTERS_PER_TEXT = 20_000
_ROWS_PER_WORD = 10_000

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Placed:
    """A record and where it came from."""

    record: Record
    place: str

    @property
    def text(self) -> str:
        """All that it says, cut to bounded length: what a tokenizer is trained on."""
        record = self.record
        texts = (record.prompt.text, record.completion, record.chosen, record.rejected)
        return "\n".join(text for text in texts if text)[:_CHARACTERS_PER_TEXT]


@dataclass(frozen=True)
class Records:
    """What a role's source holds. count: usable records. characters: of their texts, each cut, together."""

    count: int
    characters: int
    read: Callable[[], Iterator[Placed]]


def find_records(
    data: DataConfig, *, role: str, run_seed: int, tally: Tally, progress: Progress = lambda rows: None
) -> Records | None:
    """Look through the source of a role, or None if it has none here. Raises InputError.

    progress: told now and then how many rows were looked at.
    """
    source = getattr(data, role)
    if isinstance(source, SortDigitsSource):
        tally.read = source.rows

        def made() -> Iterator[Placed]:
            records = sort_digits(source, run_seed=run_seed, role=role)
            return (Placed(record, f"sort_digits: row {i}") for i, record in enumerate(records, start=1))

        return _counted(made(), made)
    if isinstance(source, FileSource):
        return _from_files(source, role=role, tally=tally, progress=progress)
    return None


def sample_texts(found: Iterable[Records]) -> list[str]:
    """Evenly spaced texts of all records, of bounded size together."""
    found = list(found)
    stride = max(1, -(-sum(records.characters for records in found) // SAMPLE_CHARACTERS))
    placed = chain.from_iterable(records.read() for records in found)
    return [item.text for item in islice(placed, 0, None, stride)]


def _counted(first: Iterator[Placed], read: Callable[[], Iterator[Placed]]) -> Records:
    count = characters = 0
    for placed in first:
        count += 1
        characters += len(placed.text)
    return Records(count, characters, read)


def _from_files(source: FileSource, *, role: str, tally: Tally, progress: Progress) -> Records:
    """Two looks: which columns there are, then which rows are good."""
    columns: dict[str, None] = {}
    for row in _told(read_source(source, role=role), progress):
        columns.update(dict.fromkeys(row.fields))
        tally.read += 1
    if not tally.read:
        raise InputError(f"data.{role}.path: {source.path}: expected rows, found none (blank or empty)")
    parse = parser_for(source, list(columns), role=role, where=source.path)
    bad = _BadRows(tally)

    def read() -> Iterator[Placed]:
        return _parsed(read_source(source, role=role), parse, role=role, refuse=lambda row, fault: None)

    rows = _told(read_source(source, role=role), progress)
    records = _counted(_parsed(rows, parse, role=role, refuse=bad), read)
    if bad.rows > MAX_BAD_FRACTION * tally.read:
        raise InputError(
            f"{bad.first}; {bad.rows} of {tally.read} rows of data.{role} are bad, at most "
            f"{MAX_BAD_FRACTION:.0%} may be; correct them, or say what the columns mean in data.{role}.columns "
            f"(found: {list(columns)})"
        )
    return records


class _BadRows:
    """Counts rows that cannot be used, and remembers the first. A pair without a winner is no bad row."""

    def __init__(self, tally: Tally) -> None:
        self.rows = 0
        self.first = ""
        self._tally = tally

    def __call__(self, row: Row, fault: BadRow) -> None:
        self._tally.drop(fault.reason, row.place)
        if not isinstance(fault, Tie):
            self.rows += 1
            self.first = self.first or f"{row.where}: {fault}"


def _told(rows: Iterable[Row], progress: Progress) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if number % _ROWS_PER_WORD == 0:
            progress(number)
        yield row


def _parsed(
    rows: Iterable[Row], parse: Parser, *, role: str, refuse: Callable[[Row, BadRow], None]
) -> Iterator[Placed]:
    for row in rows:
        try:
            yield Placed(_parse_row(row, parse, role=role), row.place)
        except BadRow as fault:
            refuse(row, fault)


def _parse_row(row: Row, parse: Parser, *, role: str) -> Record:
    record = parse(row.fields)
    for name in NEEDED[role]:
        if getattr(record, name) is None:
            raise BadRow(f"expected a {name}", "none")
    texts = [record.prompt.text, record.completion, record.chosen, record.rejected, record.answer]
    try:
        "".join(text for text in texts if text).encode()
    except UnicodeEncodeError:
        raise BadRow("expected valid Unicode", "a lone surrogate") from None
    return record
