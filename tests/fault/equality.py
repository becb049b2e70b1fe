"""Whether two stores hold the same run, bit for bit; and what a store holds that it should not."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from stages.artifacts import layout, schemas
from stages.artifacts.durable import digest_file
from stages.artifacts.shards import read_rows

Json = dict[str, Any]
WORK_DONE = {
    *("wall_seconds", "seconds", "waiting", "gen_tok/s", "train_tok/s"),
    *("computed_tokens", "padding_fraction", "model_flops"),
}
"""Figures of the work that a start did, such as wall-clock seconds: a resumed start does less of it."""


def manifests(store: Path) -> dict[str, Json]:
    """Every committed artifact's manifest, by `stage/fingerprint`."""
    paths = (store / "artifacts").glob(f"*/*/{layout.MANIFEST}")
    return {f"{p.parent.parent.name}/{p.parent.name}": json.loads(p.read_text()) for p in paths}


def differences(reference: Path, store: Path, *, partial: bool = False) -> list[str]:
    """What differs between a finished reference and a store; partial: the store may hold less of the run."""
    expected, found = manifests(reference), manifests(store)
    names = sorted(expected.keys() ^ found.keys()) if not partial else sorted(found.keys() - expected.keys())
    lines = [f"{name}: {'missing' if name in expected else 'made besides'}" for name in names]
    for name in sorted(expected.keys() & found.keys()):
        lines += _artifact(name, expected[name], found[name], store / "artifacts" / name)
    return lines if partial else lines + _runs(reference, store)


def _artifact(name: str, expected: Json, found: Json, directory: Path) -> list[str]:
    lines = []
    for file in sorted(expected["files"].keys() | found["files"].keys()):
        there, here = expected["files"].get(file), found["files"].get(file)
        path = directory / file
        if there != here:
            lines.append(f"{name}/{file}: manifest says {here}, reference {there}")
        elif path.exists() and digest_file(path) != there["sha256"]:
            lines.append(f"{name}/{file}: its bytes are not what its manifest says")
    lines += _different(f"{name}: metric", _figures(expected["metrics"]), _figures(found["metrics"]))
    return lines


def _runs(reference: Path, store: Path) -> list[str]:
    expected = {p.name: p for p in (reference / "runs").iterdir()}
    found = {p.name: p for p in (store / "runs").iterdir()}
    lines = [f"run {name}: only in one store" for name in sorted(expected.keys() ^ found.keys())]
    for name in sorted(expected.keys() & found.keys()):
        there, here = expected[name], found[name]
        lines += _different(f"run {name}: figure", _rows(there), _rows(here))
        lines += _different(f"run {name}: document", _documents(there, reference), _documents(here, store))
    return lines


def _rows(run: Path) -> Json:
    """Metric rows by key; one that occurs twice counts as different."""
    rows = read_rows(run, "metrics", schemas.METRICS)
    keys = Counter((row["round_index"], row["stage"], row["step"], row["metric"]) for row in rows)
    figures = {
        str((row["round_index"], row["stage"], row["step"], row["metric"])): row["value"]
        for row in rows
        if row["metric"] not in WORK_DONE
    }
    return figures | {f"{key} occurs {count} times": None for key, count in keys.items() if count > 1}


def _documents(run: Path, store: Path) -> Json:
    """The JSON documents of a run directory, without the store's place and the figures of work done."""
    found = {}
    for path in (run / "config.json", run / "summary.json", *sorted((run / "jobs").glob("*.json"))):
        text = path.read_text().replace(str(store), "STORE") if path.exists() else "null"
        for figure in WORK_DONE:
            text = re.sub(rf'"{re.escape(figure)}": [^,\n]*', f'"{figure}": 0', text)
        found[path.name] = text
    return found


def _figures(metrics: Json) -> Json:
    return {name: value for name, value in metrics.items() if name not in WORK_DONE}


def _different(what: str, expected: Json, found: Json) -> list[str]:
    names = sorted(expected.keys() | found.keys())
    return [
        f"{what} {name}: {_short(found.get(name))}, reference {_short(expected.get(name))}"
        for name in names
        if not _same(expected.get(name, "none"), found.get(name, "none"))
    ]


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]}…"


def litter(store: Path) -> list[str]:
    """What a finished store should not hold: unfinished attempts, and temporary files anywhere."""
    found = {p for p in store.rglob("*") if p.name.startswith(".") and p.name.endswith(".tmp")}
    found |= {p for p in (store / "attempts").rglob("*") if p.is_file()}
    found |= set((store / "attempts").glob("*/*"))
    return sorted(p.relative_to(store).as_posix() for p in found)
