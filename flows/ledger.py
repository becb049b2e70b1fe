"""Where a run's time went and what its figures are, stage by stage, as Arrow files in the run directory.

Both files grow by what is new: a round costs the same to write down whether it is the first or the five hundredth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.artifacts import layout, schemas
from stages.artifacts.errors import InputError
from stages.artifacts.shards import read_rows, read_table, record_batches, write_batches
from tasks.run import Outcome, Run

Row = dict[str, Any]
_WIDTHS = (38, 5, 8, 8, 8, 8, 8, 10, 8, 8)
_NAMES = ("seconds of", "times", "all", "waiting", "start", "work", "commit", "tokens/s", "GFLOP/s", "of limit")


class GrowingFile:
    """An Arrow file whose rows are added to and never changed."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Take more rows; they are written by write()."""
        self._batches.extend(record_batches(rows, self._schema))

    def write(self, *, first: Sequence[pa.RecordBatch] = ()) -> None:
        """Write all rows, whole or not at all; `first` before them."""
        write_batches(self._path, [*first, *self._batches], self._schema)


class Ledger:
    """Follows the outcomes of a run. What an earlier start spent on a stage stays, until a later one makes it again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen = 0
        path = layout.run_ledger(run.directory)
        self._earlier = {row["stage"]: row for row in _whole_rows(path)}
        self._kept = record_batches(list(self._earlier.values()), schemas.LEDGER)
        self._costs = GrowingFile(path, schemas.LEDGER)
        self._metrics = GrowingFile(layout.run_metrics(run.directory), schemas.METRICS)
        self.rows: list[Row] = []

    def write(self) -> None:
        """Write down the outcomes since the last time."""
        new = self._run.outcomes[self._seen :]
        self._seen = len(self._run.outcomes)
        costs = [cost_row(outcome) for outcome in new if not (outcome.reused and outcome.label in self._earlier)]
        if again := [row["stage"] for row in costs if row["stage"] in self._earlier]:
            for stage in again:
                del self._earlier[stage]
            self._kept = record_batches(list(self._earlier.values()), schemas.LEDGER)
        self.rows.extend(costs)
        self._costs.add(costs)
        self._metrics.add([row for outcome in new for row in metric_rows(outcome)])
        self._costs.write(first=self._kept)
        self._metrics.write()


def _whole_rows(path: Path) -> list[Row]:
    """The rows of an earlier start. None where the file is not there or damaged: no result depends on wall times."""
    try:
        rows: list[Row] = read_table(path, schemas.LEDGER).to_pylist()
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
    return {
        "round_index": layout.round_of(outcome.label),
        "stage": outcome.label,
        "seconds": costs.seconds,
        "waiting_seconds": costs.waiting_seconds,
        "start_seconds": costs.start_seconds,
        "work_seconds": costs.work_seconds,
        "commit_seconds": costs.commit_seconds,
        "bytes": costs.bytes,
        "tokens": int(tokens),
        "padding_fraction": metrics.get("padding_fraction", 0.0),
        "model_flops": operations,
        "limit_flops": costs.limit_flops,
    }


def summary_table(rows: Sequence[Row]) -> list[str]:
    """Where the time went, by kind of stage, the dearest first, as a person reads it. Nothing where nothing ran.

    of limit: operations per second as a share of the most that matrix products alone reach on the same devices.
    """
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["work_seconds"] > 0:
            kinds[_kind(row["stage"])].append(row)
    if not kinds:
        return []
    limit = max(row["limit_flops"] for row in rows)
    lines = [_line(_NAMES)]
    for kind, group in sorted(kinds.items(), key=lambda item: -sum(row["seconds"] for row in item[1])):
        total = {name: sum(row[name] for row in group) for name in group[0] if name != "stage"}
        spans = [total[f"{name}seconds"] for name in ("", "waiting_", "start_", "work_", "commit_")]
        rates = [total["tokens"] / total["work_seconds"], total["model_flops"] / total["work_seconds"] / 1e9]
        shown = [f"{span:.2f}" for span in spans] + [f"{rates[0]:.0f}", f"{rates[1]:.1f}"]
        shown[-2:] = [cell if rate else "-" for cell, rate in zip(shown[-2:], rates, strict=True)]
        shown.append(f"{rates[1] * 1e9 / limit:.0%}" if rates[1] and limit else "-")
        lines.append(_line((kind, str(len(group)), *shown)))
    return lines


def _kind(label: str) -> str:
    """`round-003-update_policy` and `after-003-...` without the number: the same stage, round after round."""
    return "-".join(part for part in label.split("-") if not part.isdigit())


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, _WIDTHS, strict=True)))
