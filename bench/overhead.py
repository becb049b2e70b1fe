"""`python -m bench.overhead`: what orchestration costs a round, by making everything else almost nothing.

Runs many rounds of two prompts and two tokens, and counts of each round the seconds in which no program of a stage ran
in any worker: Prefect, fingerprints, manifests, leases, pipes. Flat if the last rounds cost what the first ones do.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.flow_run import FlowRun
from bench.machine import machine
from bench.result import ROOT, median, ratio, shown, write_result
from bench.stage_times import round_ends, stage_times
from bench.watched import Watched
from configs.load import load_config

Interval = tuple[float, float]


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--config", default="bench/overhead.yaml")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--ends", type=int, default=50, help="rounds at the beginning and at the end to compare")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/overhead.json"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    began = machine()
    scratch = asked.scratch or Path(tempfile.mkdtemp(prefix="bench-ratchet-"))
    notes = scratch / "programs"
    notes.mkdir(parents=True)
    run = FlowRun(
        config=asked.config,
        overrides=(*asked.overrides, f"rounds.count={asked.rounds}"),
        scratch=scratch,
        environment={"RATCHET_BENCH_PROGRAMS": str(notes), "PYTHONPATH": str(ROOT / "bench" / "site")},
    )
    watched = run.from_policy_0(run.until_sft(scratch / "policy-0"), scratch / "store")
    ends = round_ends(stage_times(scratch / "store"))
    programs = _programs(notes)
    rounds = [_round(sooner, later, programs, watched) for sooner, later in itertools.pairwise(ends)]
    config = load_config(asked.config, overrides=list(run.overrides))
    figures = _figures(rounds, min(asked.ends, max(1, len(rounds) // 2)))
    write_result(
        asked.out,
        began=began,
        seeds=[config.seed],
        config=[asked.config, *asked.overrides],
        **figures,
        goal={"seconds_a_round": 0.35},
        rounds={name: [found[name] for found in rounds] for name in rounds[0]},
    )
    print(
        f"orchestration {shown(figures['overhead_seconds_median'], digits=3)} s a round (goal 0.35); the last rounds "
        f"{shown(figures['overhead_last_by_first'])} times the first; launcher {figures['launcher_rss_growth_bytes']} "
        f"bytes more over {len(rounds)} rounds, all processes {figures['tree_pss_growth_bytes']}"
    )
    return 0


def _round(began: float, ended: float, programs: Sequence[Interval], watched: Watched) -> dict[str, float]:
    """One round: its seconds, those of them without any program, and the memory at its end."""
    at = min(bisect.bisect_left(watched.series, (ended,)), len(watched.series) - 1)
    _, launcher, tree = watched.series[at]
    return {
        "seconds": ended - began,
        "overhead_seconds": ended - began - covered(programs, began, ended),
        "launcher_rss_bytes": launcher,
        "tree_pss_bytes": tree,
    }


def covered(intervals: Sequence[Interval], began: float, ended: float) -> float:
    """Seconds of [began, ended] that lie in any of the intervals, which are sorted by their beginning."""
    total, reached = 0.0, began
    for start, stop in intervals:
        if start >= ended:
            break
        start, stop = max(start, reached), min(stop, ended)
        if stop > start:
            total, reached = total + stop - start, stop
    return total


def _programs(notes: Path) -> list[Interval]:
    """When programs of stages ran, in any worker, by their beginning. Raises SystemExit if nobody noted any."""
    lines = [line.split() for path in notes.iterdir() for line in path.read_text().splitlines()]
    if not lines:
        raise SystemExit(
            f"{notes}: expected a line per program that ran, found none; does a worker import it otherwise?"
        )
    return sorted((float(began), float(ended)) for _, began, ended in lines)


def _figures(rounds: list[dict[str, float]], ends: int) -> dict[str, Any]:
    """Medians, and the last rounds against the first: of memory the medians' difference, of seconds their quotient."""
    first, last = rounds[:ends], rounds[-ends:]

    def of(some: list[dict[str, float]], name: str) -> float:
        value = median([found[name] for found in some])
        assert value is not None, "there are at least two rounds"
        return value

    return {
        "rounds_measured": len(rounds),
        "rounds_compared_at_each_end": ends,
        "round_seconds_median": of(rounds, "seconds"),
        "overhead_seconds_median": of(rounds, "overhead_seconds"),
        "overhead_seconds_largest": max(found["overhead_seconds"] for found in rounds),
        "overhead_last_by_first": ratio(of(last, "overhead_seconds"), of(first, "overhead_seconds")),
        "launcher_rss_growth_bytes": round(of(last, "launcher_rss_bytes") - of(first, "launcher_rss_bytes")),
        "tree_pss_growth_bytes": round(of(last, "tree_pss_bytes") - of(first, "tree_pss_bytes")),
    }


if __name__ == "__main__":
    sys.exit(main())
