"""`python -m bench.store`: Arrow written, verified and read against JSON Lines and torch.save, and a million rollouts.

Verified means that every byte was hashed and compared with a signed manifest before the first row was read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.flow_run import environment
from bench.machine import machine
from bench.result import ROOT, median, write_result

_GIB = 2**30


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000, help="rollouts in each format")
    parser.add_argument(
        "--many", type=int, default=1_000_000, help="rollouts, and rows of each role, in bounded memory"
    )
    parser.add_argument("--scratch", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--out", type=Path, default=Path("bench/results/store.json"))
    asked = parser.parse_args()
    began = machine()
    scratch = asked.scratch or Path(tempfile.mkdtemp(prefix="bench-ratchet-"))
    formats = [_work("formats", scratch, asked.rows) for _ in range(asked.repetitions)]
    medians = {name: median([found[name] for found in formats]) for name in formats[0]}
    many = _work("many", scratch, asked.many)
    prepared = {
        role: _work(kind, scratch, asked.many)
        for role, kind in (
            ("prompts", "prepare"),
            ("demonstrations", "prepare_demonstrations"),
            ("preferences", "prepare_preferences"),
        )
    }
    write_result(
        asked.out,
        began=began,
        seeds=[0],
        rows=asked.rows,
        many_rows=asked.many,
        goals={"arrow_verified_read_bytes_per_second": 1e9, "peak_rss_bytes": 1e9},
        medians=medians,
        repetitions=formats,
        many_rollouts=many,
        many_prepared=prepared,
    )
    for name, value in medians.items():
        print(f"{name:<40}{value:>16.3f}")
    print(f"{asked.many} rollouts written and read verified: peak {many['peak_rss_bytes'] / _GIB:.2f} GiB")
    for role, found in prepared.items():
        print(f"{asked.many} rows of {role} prepared: peak {found['peak_rss_bytes'] / _GIB:.2f} GiB")
    return 0


def _work(kind: str, scratch: Path, rows: int) -> dict[str, Any]:
    """One kind of work in a new process and a new directory, which is removed. Raises SystemExit if it fails."""
    directory = scratch / kind
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "bench.store_work", kind, str(directory), str(rows)]
    found = subprocess.run(
        command, cwd=ROOT, env=environment(scratch), stdout=subprocess.PIPE, text=True, check=False
    )  # fmt: skip
    if found.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {found.returncode}")
    shutil.rmtree(directory)
    figures: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    print(f"{kind}: {json.dumps(figures)}", flush=True)
    return figures


if __name__ == "__main__":
    sys.exit(main())
