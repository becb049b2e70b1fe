"""All records of one role, whichever source they come from; refuses a source with too many bad rows."""

from __future__ import annotations

from dataclasses import dataclass

from configs.sources import DataConfig, FileSource, SortDigitsSource
from stages.artifacts.errors import InputError
from stages.prepare_datasets.dialogues import BadRow
from stages.prepare_datasets.digits import sort_digits
from stages.prepare_datasets.readers import Row, read_source
from stages.prepare_datasets.report import Tally
from stages.prepare_datasets.shapes import NEEDED, Parser, Record, Tie, parser_for

MAX_BAD_FRACTION = 0.05
ROLES = ("prompts", "demonstrations", "preferences")


@dataclass(frozen=True)
class Placed:
    """A record and where it came from."""

    record: Record
    place: str


def read_records(data: DataConfig, *, role: str, run_seed: int, tally: Tally) -> list[Placed] | None:
    """The records of a role, or None if it has no source here. Raises InputError."""
    source = getattr(data, role)
    if isinstance(source, SortDigitsSource):
        made = sort_digits(source, run_seed=run_seed, role=role)
        tally.read = len(made)
        return [Placed(record, f"sort_digits: row {i}") for i, record in enumerate(made, start=1)]
    if isinstance(source, FileSource):
        return _parse(read_source(source, role=role), source, role=role, tally=tally)
    return None


def _parse(rows: list[Row], source: FileSource, *, role: str, tally: Tally) -> list[Placed]:
    columns = list(dict.fromkeys(name for row in rows for name in row.fields))
    parse = parser_for(source, columns, role=role, where=source.path)
    tally.read = len(rows)
    records: list[Placed] = []
    bad: list[tuple[Row, BadRow]] = []
    for row in rows:
        try:
            records.append(Placed(_parse_row(row, parse, role=role), row.place))
        except Tie as tie:
            tally.drop(tie.reason, row.place)
        except BadRow as error:
            tally.drop(error.reason, row.place)
            bad.append((row, error))
    if len(bad) > MAX_BAD_FRACTION * len(rows):
        row, fault = bad[0]
        raise InputError(
            f"{row.where}: {fault}; {len(bad)} of {len(rows)} rows of data.{role} are bad, at most "
            f"{MAX_BAD_FRACTION:.0%} may be; correct them, or say what the columns mean in data.{role}.columns "
            f"(found: {columns})"
        )
    return records


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
