"""`python -m bench.durability`: what hashing, flushing and manifests cost on a run, measured by turning them off.

Runs the same configuration with and without, alternately, each in a store of its own, and once more with a clock
around every durable call. Writes JSON with versions, machine and the figures of every run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import machine
from stages.artifacts.manifest import library_versions

_ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.durability", description=__doc__)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--pairs", type=int, default=5, help="runs with and runs without; 0: the clock alone")
    parser.add_argument("--out", type=Path, default=Path("bench/results/durability.json"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-ratchet-") as scratch:
        directory = Path(scratch)
        seconds: dict[str, list[float]] = {"on": [], "off": []}
        for index in range(asked.pairs):
            for side in ("on", "off") if index % 2 == 0 else ("off", "on"):
                extra = {"RATCHET_BENCH_OFF": "1"} if side == "off" else {}
                seconds[side].append(_run(asked, directory / f"{side}-{index}", directory, extra))
                print(f"{side}: {seconds[side][-1]:.1f} s", flush=True)
        times = directory / "times"
        times.mkdir()
        timed = _run(asked, directory / "timed", directory, {"RATCHET_BENCH_TIMES": str(times)})
        said = (directory / "timed.log").read_text().splitlines()
        calls = _added_up(times)
    result: dict[str, Any] = {
        "config": [asked.config, *asked.overrides],
        "timed_run": {
            "wall_seconds": timed,
            "calls_seconds": calls,
            "said": [line for line in said if " stages, " in line],
        },
        "cost_by_clock": sum(calls.values()) / timed,
        "libraries": library_versions(),
        "machine": machine(),
    }
    verdict = f"durability: {result['cost_by_clock']:.2%} of wall time by the clock"
    if asked.pairs:
        on, off = statistics.median(seconds["on"]), statistics.median(seconds["off"])
        result |= {"wall_seconds": seconds, "cost_by_turning_off": on / off - 1.0}
        verdict += f", {on / off - 1.0:+.2%} by turning it off (medians of {asked.pairs}: {on:.1f} s, {off:.1f} s)"
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{verdict}: {asked.out}")
    return 0


def _added_up(times: Path) -> dict[str, float]:
    """Seconds by call, over all processes of a run."""
    calls: dict[str, float] = {}
    for path in times.iterdir():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            calls[name] = calls.get(name, 0.0) + float(value)
    return {name: round(value, 4) for name, value in sorted(calls.items())}


def _run(asked: argparse.Namespace, store: Path, home: Path, extra: dict[str, str]) -> float:
    """Wall seconds of one run from an empty store."""
    command = [sys.executable, "-m", "flows.rlhf", "--config", asked.config, "--set", f"store={store}"]
    for override in asked.overrides:
        command += ["--set", override]
    site = str(_ROOT / "bench" / "site")
    key = {"RATCHET_KEY_FILE": str(home / "key"), "PREFECT_HOME": str(home / "prefect"), "PYTHONPATH": site}
    log = store.with_suffix(".log")
    started = time.monotonic()
    with log.open("wb") as output:
        code = subprocess.run(command, cwd=_ROOT, env={**os.environ, **key, **extra}, stdout=output, stderr=output)
    if code.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {code.returncode}:\n{log.read_text()[-2000:]}")
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
