"""The full campaign: every fault test with the trials of RELIABILITY's table, and a report of a line each.

`make torture ARGS="--minutes 60 --only r03,r08 --out outputs/torture"`. A campaign that was stopped goes on with what
it lacks; `--again` starts over. Results: <out>/results.jsonl, report: <out>/report.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINE = re.compile(r"^\.?([RS]\d\d\b.*)$", re.MULTILINE)


def collected(only: list[str]) -> list[str]:
    """The ids of the fault tests, `--only` those whose name holds one of the words."""
    argv = [sys.executable, "-m", "pytest", "tests/fault", "--collect-only", "-q", "--no-header"]
    env = {**os.environ, "RATCHET_TORTURE": "1"}  # some tests have more cases in full
    found = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False).stdout.splitlines()
    names = [line for line in found if "::" in line]
    return [name for name in names if not only or any(word in name.lower() for word in only)]


def run(name: str, *, out: Path, minutes: float) -> dict[str, Any]:
    """Run one test in full. What it printed, whether it passed, how long it took."""
    env = {**os.environ, "RATCHET_TORTURE": "1", "RATCHET_TORTURE_OUT": str(out)}
    if minutes:
        env["RATCHET_TORTURE_MINUTES"] = str(minutes)
    started = time.monotonic()
    log = out / f"{re.sub(r'[^A-Za-z0-9]+', '-', name.partition('::')[2])}.log"
    with log.open("wb") as file:
        argv = [sys.executable, "-m", "pytest", name, "-s", "-q", "--no-header", "-o", "timeout=0"]
        code = subprocess.run(argv, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(errors="replace")
    return {
        "test": name,
        "passed": code == 0,
        "skipped": code == 0 and " passed" not in text,
        "seconds": round(time.monotonic() - started, 1),
        "figures": _LINE.findall(text),
        "log": str(log),
    }


def report(results: list[dict[str, Any]]) -> str:
    """One line per test."""
    revision = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    passed = sum(row["passed"] for row in results)
    head = [
        "# Torture",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M %Z')}; revision {revision}; {os.cpu_count()} cores, {platform.platform()}.",
        f"{passed} of {len(results)} tests passed in {sum(row['seconds'] for row in results) / 60:.0f} minutes.",
        "",
        "| test | passed | seconds | figures |",
        "| --- | --- | ---: | --- |",
    ]
    rows = []
    for row in sorted(results, key=lambda row: (row["figures"] or ["~"])[0]):
        figures = "<br>".join(row["figures"]).replace("|", "\\|") or "none"
        verdict = "skipped" if row["skipped"] else "yes" if row["passed"] else f"**no**: {Path(row['log']).name}"
        rows.append(f"| {row['test'].partition('::')[2]} | {verdict} | {row['seconds']} | {figures} |")
    return "\n".join([*head, *rows]) + "\n"


def main() -> int:
    """Run what is lacking and write the report. 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="for the campaign of every durable operation")
    parser.add_argument("--only", default="", help="words of test names, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "torture")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "results.jsonl"
    if asked.again:
        for path in (kept, out / "operations.jsonl"):
            path.unlink(missing_ok=True)
    results = {row["test"]: row for row in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    for name in collected([word for word in asked.only.lower().split(",") if word]):
        if results.get(name, {}).get("passed") and "each_durable_operation" not in name:
            continue
        results[name] = run(name, out=out, minutes=asked.minutes)
        print(f"{'passed' if results[name]['passed'] else 'FAILED'}  {name}  {results[name]['seconds']} s", flush=True)
        for line in results[name]["figures"]:
            print(f"  {line}", flush=True)
        kept.write_text("".join(json.dumps(row) + "\n" for row in results.values()))
        (out / "report.md").write_text(report(list(results.values())))
    print(f"report: {out / 'report.md'}")
    return int(any(not row["passed"] for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
