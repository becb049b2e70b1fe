"""`python -m bench.critics`: rounds to the same accuracy, by what PPO's critic starts from, over seeds.

Per seed one store, so that data, policy_0 and reward model are the same bits for every start; the reward is a rule, so
that the reward model serves as a start and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.flow_run import FlowRun
from bench.machine import machine
from bench.result import median, ratio, shown, write_result

KEY = "algorithm.critic.initialize_from"
STARTS = {
    "reward-model": f"{KEY}={{kind: reward_model}}",
    "policy": f"{KEY}={{kind: policy, head: zero}}",
    "policy-seeded-head": f"{KEY}={{kind: policy, head: seeded}}",
}


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.critics", description=__doc__)
    parser.add_argument("--config", default="bench/critics.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--gain", type=float, default=0.5, help="goal: this share of the way from policy_0 to 1")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/critics.json"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args()
    began = machine()
    scratch = asked.scratch or Path(tempfile.mkdtemp(prefix="bench-ratchet-"))
    curves: dict[str, list[list[float]]] = {name: [] for name in STARTS}
    for seed in asked.seeds:
        for name, start in STARTS.items():
            curves[name].append(_curve(asked, scratch, seed=seed, name=name, start=start))
            print(f"seed {seed}, {name}: {' '.join(f'{x:.3f}' for x in curves[name][-1])}", flush=True)
    figures = {name: summary(of_seeds, gain=asked.gain) for name, of_seeds in curves.items()}
    medians = {name: found["rounds_to_goal_median"] for name, found in figures.items()}
    write_result(
        asked.out,
        began=began,
        seeds=asked.seeds,
        config=[asked.config, *asked.overrides],
        goal={"gain": asked.gain},
        starts=figures,
        policy_by_reward_model=ratio(medians["policy"], medians["reward-model"]),
    )
    print(", ".join(f"{name}: {shown(found, digits=1)} rounds" for name, found in medians.items()))
    return 0


def summary(curves: Sequence[Sequence[float]], *, gain: float) -> dict[str, Any]:
    """Of one start: held-out accuracies by seed and round (first: before the rounds), and when they reach the goal.

    The goal is policy_0's accuracy and `gain` of what is missing to 1; a seed that never reaches it has null, and the
    median is null unless every seed has reached it.
    """
    rounds = [rounds_to(curve, goal=curve[0] + gain * (1.0 - curve[0])) for curve in curves]
    reached = [float(found) for found in rounds if found is not None]
    return {
        "accuracy": [list(curve) for curve in curves],
        "rounds_to_goal": rounds,
        "rounds_to_goal_median": median(reached) if len(reached) == len(rounds) else None,
        "rounds_to_goal_spread": [min(reached), max(reached)] if reached else None,
        "last_accuracy_median": median([curve[-1] for curve in curves]),
        "mean_accuracy_median": median([sum(curve[1:]) / len(curve[1:]) for curve in curves]),
    }


def rounds_to(curve: Sequence[float], *, goal: float) -> int | None:
    """After how many rounds the accuracy is first at the goal; None if never. curve[0]: before the rounds."""
    return next((index for index, accuracy in enumerate(curve) if accuracy >= goal), None)


def _curve(asked: argparse.Namespace, scratch: Path, *, seed: int, name: str, start: str) -> list[float]:
    """Held-out accuracy before the first round and after each."""
    store = scratch / f"seed-{seed}"
    run = FlowRun(config=asked.config, overrides=tuple(asked.overrides), scratch=scratch)
    run.in_store(store, overrides=[f"seed={seed}", f"name=critics-{name}", start])
    found = sorted((store / "runs").glob(f"critics-{name}-????????/summary.json"))
    if len(found) != 1:
        raise SystemExit(f"{store}: expected the summary of one run {name}, found {len(found)}; see {store}.log")
    return [float(row["held_out"]) for row in json.loads(found[0].read_text())["rounds"]]


if __name__ == "__main__":
    sys.exit(main())
