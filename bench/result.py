"""How a bench ends: one JSON file with its figures and with what they were measured on. Measures nothing."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.machine import machine
from stages.artifacts.manifest import library_versions

ROOT = Path(__file__).resolve().parents[1]


def write_result(out: Path, *, began: Mapping[str, Any], seeds: Sequence[int], **figures: Any) -> None:
    """Write `figures` to `out`. began: machine() as it was before the first measurement."""
    versions = library_versions()
    document = {
        **figures,
        "seeds": list(seeds),
        "libraries": versions,
        "revision": _revision(),
        "machine": {**began, "load_1_minute_at_the_end": machine()["load_1_minute"]},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=2, sort_keys=False) + "\n")
    print(f"figures: {out}", flush=True)


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing: a figure that was not measured is null in the JSON, never zero."""
    return statistics.median(values) if values else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient, or None where one of them was not measured."""
    return numerator / denominator if numerator is not None and denominator else None


def shown(value: float | None, *, digits: int = 2) -> str:
    """A figure for the verdict's line."""
    return "not measured" if value is None else f"{value:.{digits}f}"


def _revision() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
