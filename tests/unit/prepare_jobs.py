"""Small jobs for prepare_datasets: a data configuration -> a finished artifact, opened for looking at."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.models import FromScratch, Pretrained
from configs.sources import DataConfig
from stages.artifacts import schemas
from stages.artifacts.shards import read_rows
from stages.prepare_datasets.digests import source_digests
from stages.prepare_datasets.job import Parameters, PrepareDatasets
from stages.prepare_datasets.run import run
from stages.program import Context

DIGITS: dict[str, Any] = {"kind": "sort_digits", "rows": 64, "min_digits": 3, "max_digits": 4}
REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Prepared:
    """What a run of prepare_datasets left behind."""

    out: Path
    metrics: dict[str, float]

    @property
    def report(self) -> dict[str, Any]:
        """report.json."""
        document: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return document

    def rows(self, kind: str, part: str = "") -> list[dict[str, Any]]:
        """Rows of a kind, of one part or of both."""
        parts = [part] if part else ["train", "held_out"]
        return [row for p in parts for row in read_rows(self.out, f"{kind}_{p}", schemas.ALL[kind])]

    def dropped(self, kind: str) -> dict[str, int]:
        """Reason -> number of rows."""
        return {reason: entry["rows"] for reason, entry in self.report[kind]["rows_dropped"].items()}


def files(path: Path | str, **more: Any) -> dict[str, Any]:
    """A file source."""
    return {"kind": "files", "path": str(path), **more}


def prepare_job(tmp_path: Path, *, base: FromScratch | Pretrained | None = None, **data: Any) -> PrepareDatasets:
    """The job for these sources; held_out_fraction 0.3 so that small inputs have both parts."""
    config = DataConfig(**{"prompts": DIGITS, "held_out_fraction": 0.3, **data})
    parameters = Parameters(data=config, base=base or FromScratch(), digests=source_digests(config, None))
    return PrepareDatasets(store=tmp_path / "store", seed=17, parameters=parameters)


def prepare(tmp_path: Path, *, base: FromScratch | Pretrained | None = None, **data: Any) -> Prepared:
    """Run the stage in this process."""
    out = tmp_path / f"out{next(_numbers)}"
    out.mkdir()
    return Prepared(out, run(prepare_job(tmp_path, base=base, **data), Context(out=out)))


def json_lines(rows: list[Any]) -> bytes:
    """Rows as JSON Lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
