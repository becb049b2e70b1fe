"""`python -m bench.scaling --axis prompts`: what a round costs as prompts, rounds, the model, ranks or engines grow.

Also what waiting costs: for the longest completions (`--axis tail`), or for the policy (`--axis staleness`). Each point
is a run of our flow from policy_0, which has a shape of its own where the axis is of shapes. The points are run in
turns, so that a change of the machine is spread over all of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.flow_run import FlowRun
from bench.machine import machine
from bench.result import median, shown, write_result
from bench.stage_times import of_rounds, round_ends, stage_times
from configs.load import load_config


@dataclass(frozen=True)
class Axis:
    """What grows. points: overrides of the configuration, by the name of the point. rounds: of each run.

    shares_policy_0: whether all points begin from the same one.
    """

    points: Mapping[str, tuple[str, ...]]
    rounds: int = 6
    shares_policy_0: bool = True


def _model(hidden: int, layers: int, mlp: int) -> tuple[str, ...]:
    base = {"hidden": hidden, "layers": layers, "heads": hidden // 32, "mlp": mlp}
    return tuple(f"model.base.{name}={value}" for name, value in base.items())


AXES = {
    "rounds": Axis({"rounds": ()}, rounds=60),
    "prompts": Axis({str(n): (f"rounds.prompts_per_round={n}",) for n in (16, 32, 64, 128, 256)}),
    "group": Axis({str(n): (f"rounds.group_size={n}",) for n in (4, 8, 16)}),
    "model": Axis(
        {
            "0.4M": _model(96, 3, 256),
            "1.4M": _model(192, 3, 512),
            "5M": _model(256, 6, 704),
            "14M": _model(384, 8, 1024),
        },
        shares_policy_0=False,
    ),
    "ranks": Axis(
        {str(n): (f"resources.trainer.ranks={n}", "resources.trainer.threads=1") for n in (1, 2)},
        shares_policy_0=False,
    ),
    "engines": Axis(
        {
            str(n): (f"resources.generator.engines={n}", "resources.generator.threads=1", "rounds.prompts_per_shard=16")
            for n in (1, 2)
        }
    ),
    "tail": Axis({str(share): (f"sampling.finish_fraction={share}",) for share in (1.0, 0.95, 0.9, 0.8)}),
    "staleness": Axis({str(n): (f"rounds.staleness={n}",) for n in (0, 1)}, rounds=10),
}


def main() -> int:
    """Measure and write the result, again after every turn."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--axis", choices=sorted(AXES), required=True)
    parser.add_argument("--config", default="configs/quickstart_grpo.yaml")
    parser.add_argument("--points", nargs="*", help="some of the axis's points, instead of all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="of each run; the first is warm-up")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args()
    axis = AXES[asked.axis]
    points = asked.points or list(axis.points)
    unknown = sorted(set(points) - set(axis.points))
    if unknown:
        raise SystemExit(f"--points: expected some of {', '.join(axis.points)}, found {', '.join(unknown)}")
    began = machine()
    scratch = asked.scratch or Path(tempfile.mkdtemp(prefix="bench-ratchet-"))
    out = asked.out or Path(f"bench/results/scaling_{asked.axis}.json")
    extra = (f"rounds.count={asked.rounds or axis.rounds}", "evaluation.every=100000", "evaluation.prompts=8")
    seed = load_config(asked.config, overrides=asked.overrides).seed
    runs: dict[str, list[dict[str, Any]]] = {point: [] for point in points}
    for turn in range(asked.repetitions):
        for point in points if turn % 2 == 0 else reversed(points):
            overrides = (*asked.overrides, *axis.points[point], *extra)
            policy_0 = scratch / ("policy-0" if axis.shares_policy_0 else f"policy-0-{point}")
            run = FlowRun(asked.config, overrides, scratch)
            runs[point].append(_measure(run, policy_0, scratch / f"{point}-{turn}"))
            print(f"{asked.axis} {point}: {shown(runs[point][-1]['round_seconds_median'], digits=3)} s", flush=True)
        medians = {point: _medians(found) for point, found in runs.items() if found}
        write_result(
            out,
            began=began,
            seeds=[seed],
            axis=asked.axis,
            config=[asked.config, *asked.overrides],
            points={point: list(axis.points[point]) for point in points},
            medians=medians,
            runs=runs,
        )
    return 0


def _measure(run: FlowRun, policy_0: Path, store: Path) -> dict[str, Any]:
    """One run: its rounds after the first, its stages' seconds, its speed and its memory."""
    watched = run.from_policy_0(run.until_sft(policy_0), store)
    stages = stage_times(store)
    ends = round_ends(stages)
    seconds = [later - sooner for sooner, later in pairwise(ends)]
    generated = of_rounds(stages, "generate_rollouts")
    later_rounds = [index for index in sorted(generated) if index > 0]
    by_stage: dict[str, list[float]] = {}
    for stage in stages:
        if stage.is_round and stage.round_index > 0:
            by_stage.setdefault(stage.stage, []).append(stage.seconds)
    return {
        "round_seconds": seconds,
        "round_seconds_median": median(seconds),
        "tokens_a_round": median([generated[index].metrics["generated_tokens"] for index in later_rounds]),
        "stage_seconds_median": {name: median(found) for name, found in by_stage.items()},
        "first_round_seconds": ends[0] - watched.started_at,
        "peak_pss_bytes": watched.peak_pss_bytes,
    }


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("round_seconds_median", "tokens_a_round", "first_round_seconds", "peak_pss_bytes")
    found: dict[str, Any] = {name: median([run[name] for run in runs]) for name in names}
    stages = runs[0]["stage_seconds_median"]
    found["stage_seconds"] = {name: median([run["stage_seconds_median"][name] for run in runs]) for name in stages}
    return found


if __name__ == "__main__":
    sys.exit(main())
