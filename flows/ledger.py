"""Where a run's time went and what its figures are, stage by stage, as Arrow files in the run directory.

They grow by what is new: a round costs the same to write down whether it is the first or the five hundredth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.artifacts import layout, schemas
from stages.artifacts.errors import InputError
from stages.artifacts.shards import read_rows, write_batches
from tasks.run import Outcome, Run

Row = dict[str, Any]
_WIDTHS = (38, 5, 7, 7, 7, 7, 7, 7, 9, 8, 8, 7, 7)
_NAMES = (
    *("seconds of", "times", "all", "waiting", "start", "work", "commit", "ahead"),
    *("tokens/s", "GFLOP/s", "of limit", "padding", "MB"),
)


class GrowingRows:
    """Arrow files `<kind>-NNNNN.arrow` whose rows are added to and never changed; a full one is not touched again."""

    def __init__(self, directory: Path, kind: str, schema: pa.Schema, *, rows_per_file: int = 4096) -> None:
        self._directory = directory
        self._kind = kind
        self._schema = schema
        self._rows_per_file = rows_per_file
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget every row: the next write() begins with the first file, and no other stays."""
        self._index = 0
        self._open: pa.Table = self._schema.empty_table()
        self._begins = True

    def add(self, rows: Sequence[Row]) -> None:
        """Take more rows; they are written by write()."""
        more = pa.Table.from_pylist(list(rows), schema=self._schema)
        self._open = pa.concat_tables([self._open, more]).combine_chunks()

    def write(self) -> None:
        """Write the rows since the last full file, each file whole or not at all."""
        if self._begins:
            for path in sorted(self._directory.glob(f"{self._kind}-?????.arrow"), reverse=True):
                if path > layout.shard(self._directory, self._kind, 0):
                    path.unlink()
            self._begins = False
        self._write_open()
        while len(self._open) > self._rows_per_file:
            self._open = self._open.slice(self._rows_per_file).combine_chunks()
            self._index += 1
            self._write_open()

    def _write_open(self) -> None:
        path = layout.shard(self._directory, self._kind, self._index)
        write_batches(path, self._open.slice(0, self._rows_per_file).to_batches(), self._schema)


class Ledger:
    """Follows the outcomes of a run. What an earlier start spent on a stage stays, until a later one makes it again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen = 0
        self._earlier = {row["stage"]: row for row in _whole_rows(run.directory)}
        self._costs = GrowingRows(run.directory, "ledger", schemas.LEDGER)
        self._costs.add(list(self._earlier.values()))
        self._metrics = GrowingRows(run.directory, "metrics", schemas.METRICS)
        self.rows: list[Row] = []

    def write(self) -> None:
        """Write down the outcomes since the last time."""
        new = self._run.outcomes[self._seen :]
        self._seen = len(self._run.outcomes)
        costs = [cost_row(outcome) for outcome in new if not (outcome.reused and outcome.label in self._earlier)]
        again = [row["stage"] for row in costs if row["stage"] in self._earlier]
        for stage in again:
            del self._earlier[stage]
        if again:
            self._costs.begin_anew()
            self._costs.add([*self._earlier.values(), *self.rows])
        self.rows.extend(costs)
        self._costs.add(costs)
        self._metrics.add([row for outcome in new for row in metric_rows(outcome)])
        self._costs.write()
        self._metrics.write()

    def of_round(self, round_index: int) -> dict[str, float]:
        """What the stages of a round cost in this start, by `cost/<stage>/<column>`."""
        recent = takewhile(lambda row: row["round_index"] >= round_index - 1, reversed(self.rows))
        kinds = _by_kind(row for row in recent if row["round_index"] == round_index)
        return {f"cost/{kind}/{name}": value for kind, rows in kinds.items() for name, value in _total(rows).items()}


def _whole_rows(directory: Path) -> list[Row]:
    """The rows of an earlier start. None where a file is damaged or none is there: no result depends on wall times."""
    try:
        rows = read_rows(directory, "ledger", schemas.LEDGER)
    except (OSError, pa.ArrowInvalid, InputError):
        return []
    return rows


def metric_rows(outcome: Outcome) -> list[Row]:
    """Every figure of a stage, and those of its optimizer steps."""
    base = {"round_index": layout.round_of(outcome.label), "stage": outcome.label, "step": -1}
    figures = outcome.metrics | {"wall_seconds": outcome.seconds}
    rows = [base | {"metric": name, "value": value} for name, value in sorted(figures.items())]
    if (outcome.path / "metrics-00000.arrow").exists():
        rows.extend(read_rows(outcome.path, "metrics", schemas.METRICS))
    return rows


def cost_row(outcome: Outcome) -> Row:
    """What a stage cost in this start of the run."""
    costs, metrics = outcome.costs, outcome.metrics
    tokens = 0.0 if outcome.reused else metrics.get("generated_tokens", metrics.get("computed_tokens", 0.0))
    operations = 0.0 if outcome.reused else metrics.get("model_flops", 0.0)
    worked = costs.work_seconds + costs.ahead_seconds
    return {
        "round_index": layout.round_of(outcome.label),
        "stage": outcome.label,
        "seconds": costs.seconds,
        "waiting_seconds": costs.waiting_seconds,
        "start_seconds": costs.start_seconds,
        "work_seconds": costs.work_seconds,
        "commit_seconds": costs.commit_seconds,
        "ahead_seconds": costs.ahead_seconds,
        "bytes": costs.bytes,
        "tokens": int(tokens),
        "padding_fraction": metrics.get("padding_fraction", 0.0),
        "model_flops": operations,
        "least_seconds": costs.least_seconds,
        "tokens_per_second": tokens / worked if worked else 0.0,
        "limit_share": costs.least_seconds / worked if worked else 0.0,
    }


def summary_table(rows: Sequence[Row]) -> list[str]:
    """Where the time went, by kind of stage, the dearest first, as a person reads it. Nothing where nothing ran.

    of limit: the least time in which the devices could have done it, by what they copy and multiply per second, as a
    share of the time that it took, where that least time is known. padding: of the tokens that models computed. MB: of
    artifacts.
    """
    kinds = _by_kind(row for row in rows if row["work_seconds"] > 0)
    if not kinds:
        return []
    totals = {kind: _total(group) for kind, group in kinds.items()}
    lines = [_line(_NAMES)]
    for kind, total in sorted(totals.items(), key=lambda item: -item[1]["seconds"] - item[1]["ahead_seconds"]):
        spans = [total[f"{name}seconds"] for name in ("", "waiting_", "start_", "work_", "commit_", "ahead_")]
        operations = total["model_flops"] / (total["work_seconds"] + total["ahead_seconds"])
        shown = [f"{span:.2f}" for span in spans]
        shown.append(f"{total['tokens_per_second']:.0f}" if total["tokens"] else "-")
        shown.append(f"{operations / 1e9:.1f}" if operations else "-")
        shown.append(f"{total['limit_share']:.0%}" if total["limit_share"] else "-")
        shown.append(f"{total['padding_fraction']:.1%}" if operations else "-")
        shown.append(f"{total['bytes'] / 1e6:.1f}")
        lines.append(_line((kind, str(len(kinds[kind])), *shown)))
    return lines


def _by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of `round-003-update_policy`, `after-003-...` and so on without the number: the same stage, every round."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds["-".join(part for part in row["stage"].split("-") if not part.isdigit())].append(row)
    return kinds


def _total(rows: Sequence[Row]) -> dict[str, float]:
    """Rows of one stage as one: sums; rates and shares of all that they are of."""
    found = {name: float(sum(row[name] for row in rows)) for name in rows[0] if name not in ("round_index", "stage")}
    worked = found["work_seconds"] + found["ahead_seconds"]
    known = [row for row in rows if row["least_seconds"]]
    spent = sum(row["work_seconds"] + row["ahead_seconds"] for row in known)
    found["tokens_per_second"] = found["tokens"] / worked if worked else 0.0
    found["limit_share"] = found["least_seconds"] / spent if known else 0.0
    wasted = sum(row["padding_fraction"] * row["tokens"] for row in rows)
    found["padding_fraction"] = wasted / found["tokens"] if found["tokens"] else 0.0
    return found


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, _WIDTHS, strict=True)))
