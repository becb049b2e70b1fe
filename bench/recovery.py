"""`python -m bench.recovery`: from a kill to the first useful step, on the tiny pipeline, engine start shown apart.

Kills the run in round 1 with SIGKILL, runs the same command again, and notes when the first new artifact is committed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
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
_MADE = re.compile(r"^(\S+)\s+[\d.]+ s(?:\s|$)")
_READY = re.compile(r"(trainer|generator) ready after ([\d.]+) s")
_KILL_AFTER = ("round-001-generate_rollouts", "round-001-compute_logprobs", "round-001-update_policy")


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--config", default="tests/integration/tiny_ppo.yaml")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("bench/results/recovery.json"))
    asked = parser.parse_args()
    trials = []
    with tempfile.TemporaryDirectory(prefix="bench-ratchet-") as scratch:
        for index in range(asked.trials):
            trials.append(_trial(asked.config, Path(scratch), index))
            print(json.dumps(trials[-1]), flush=True)
    seconds = [trial["first_commit_seconds"] for trial in trials]
    result: dict[str, Any] = {
        "config": asked.config,
        "first_commit_seconds": {"median": statistics.median(seconds), "largest": max(seconds)},
        "trials": trials,
        "libraries": library_versions(),
        "machine": machine(),
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"kill to first useful step: median {statistics.median(seconds):.1f} s, largest {max(seconds):.1f} s")
    return 0


def _trial(config: str, scratch: Path, index: int) -> dict[str, Any]:
    """One kill and one resume."""
    after = _KILL_AFTER[index % len(_KILL_AFTER)]
    command = [sys.executable, "-m", "flows.rlhf", "--config", config, "--set", f"store={scratch / str(index)}"]
    env = {**os.environ, "RATCHET_KEY_FILE": str(scratch / "key"), "PREFECT_HOME": str(scratch / "prefect")}
    first = subprocess.Popen(command, cwd=_ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith(after):
            first.send_signal(signal.SIGKILL)
            break
    first.wait()
    started = time.monotonic()
    again = subprocess.Popen(command, cwd=_ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert again.stdout is not None
    found: dict[str, Any] = {"killed_after": after}
    for line in again.stdout:
        made = _MADE.match(line)
        if made and "first_commit" not in found:
            found |= {"first_commit": made[1], "first_commit_seconds": round(time.monotonic() - started, 2)}
        for kind, seconds in _READY.findall(line):
            found[f"{kind}_start_seconds"] = float(seconds)
    if again.wait() != 0:
        raise SystemExit(f"{' '.join(command)} ended with {again.returncode}")
    return found


if __name__ == "__main__":
    sys.exit(main())
