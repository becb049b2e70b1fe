"""`python -m bench.methods`: does every method learn the quickstart task, with the same rounds and rollouts?

Runs of one seed share data and SFT through one store. Killed, it goes on where it was: the same command again with the
same --scratch. Writes the JSON again after every run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.flow_run import FlowRun
from bench.machine import machine
from bench.result import median, write_result
from configs.load import load_config
from configs.schema import RunConfig
from stages.artifacts import layout
from stages.artifacts.durable import read_json
from tasks.run import run_name

CONFIG = "configs/quickstart.yaml"
BUDGET = ("rounds.count=8", "evaluation.rewards=[{kind: verifier, verifier: exact_match}]")
REWARD_MODEL = ("rounds.prompts_per_round=256", "rounds.prompts_per_shard=256", "rounds.group_size=1")
VERIFIER = (
    "reward_model=null",
    "rewards=[{kind: verifier, verifier: exact_match}]",
    "rounds.prompts_per_round=32",
    "rounds.prompts_per_shard=32",
    "rounds.group_size=8",
)


@dataclass(frozen=True)
class Method:
    """One row of the table. algorithm: what is set of its union member; the rest is the method's vetted default.

    reward: what it is trained on. note: why something is set otherwise than by default.
    """

    algorithm: Mapping[str, Any]
    reward: str = "exact_match"
    note: str = ""

    def overrides(self, name: str) -> tuple[str, ...]:
        """The configuration's changes, as the command line takes them."""
        chosen = VERIFIER if self.reward == "exact_match" else REWARD_MODEL
        return (
            f"name=methods-{name.replace('_', '-')}",
            f"algorithm={json.dumps({'name': name, **self.algorithm})}",
            *chosen,
        )


_GROUP = {"num_minibatches": 4, "policy_optimizer": {"learning_rate": 1e-4}}

METHODS = {
    "grpo": Method({**_GROUP, "kl_coef": 0.05}, note="as quickstart_grpo.yaml"),
    "rloo": Method(_GROUP),
    "reinforce_pp": Method(_GROUP),
    "reinforce_pp_baseline": Method(_GROUP),
    "dr_grpo": Method(_GROUP),
    "dapo": Method(_GROUP),
    "gspo": Method(_GROUP),
    "cispo": Method(_GROUP),
    "ppo": Method(
        {
            "num_minibatches": 4,
            "kl_coef": 0.15,
            "policy_optimizer": {"learning_rate": 5e-5},
            "critic_optimizer": {"learning_rate": 3e-4},
        },
        reward="reward_model",
        note="as quickstart.yaml",
    ),
}


def main() -> int:
    """Measure what is not measured yet and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.methods", description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--scratch", type=Path, help="of an earlier start, to go on with it")
    parser.add_argument("--out", type=Path, default=Path("bench/results/methods.json"))
    asked = parser.parse_args()
    began = machine()
    scratch = (asked.scratch or Path(tempfile.mkdtemp(prefix="bench-ratchet-"))).resolve()
    print(f"scratch: {scratch}", flush=True)
    runs: list[dict[str, Any]] = []
    for seed in asked.seeds:
        for name in asked.methods:
            runs.append(_learn(name, METHODS[name], seed, scratch))
            print(line(runs[-1]), flush=True)
            write_result(
                asked.out,
                began=began,
                seeds=sorted({run["seed"] for run in runs}),
                config=[CONFIG, *BUDGET],
                methods=[_row(method, runs) for method in asked.methods],
                runs=runs,
            )
    return 0


def _learn(name: str, method: Method, seed: int, scratch: Path) -> dict[str, Any]:
    """One run to its end, or what it came to where that is known already."""
    flow = FlowRun(config=CONFIG, overrides=(*BUDGET, *method.overrides(name), f"seed={seed}"), scratch=scratch)
    store = scratch / "store"
    config = load_config(CONFIG, overrides=[*flow.overrides, f"store={store}"])
    summary = layout.run_directory(store, run_name(config)) / "summary.json"
    if not summary.exists():
        flow.in_store(store, log=scratch / f"{name}-{seed}.log")
    return figures(name, method, config, read_json(summary)["rounds"])


def figures(name: str, method: Method, config: RunConfig, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run learnt. rounds: those of its summary.json, the first of them before any training."""
    curve = [row["held_out"] for row in rounds]
    best = max(range(len(curve)), key=lambda index: (curve[index], -index))
    trained = [row for row in rounds if "reward" in row]
    algorithm = config.algorithm
    return {
        "method": name,
        "seed": config.seed,
        "reward": method.reward,
        "note": method.note,
        "rollouts": config.rounds.count * config.rounds.prompts_per_round * config.rounds.group_size,
        "learning_rate": algorithm.policy_optimizer.learning_rate,
        "kl": [algorithm.kl_coef, algorithm.kl_estimator, algorithm.kl_placement] if algorithm.kl_coef else None,
        "algorithm": algorithm.model_dump(mode="json"),
        "before": curve[0],
        "last": curve[-1],
        "best": curve[best],
        "best_round": rounds[best]["round"],
        "held_out": curve,
        "training_reward": [row["reward"] for row in trained],
        "clip_fraction": [row["clip"] for row in trained],
        "entropy": [row["entropy"] for row in trained],
    }


def line(run: Mapping[str, Any]) -> str:
    """A run in one line, for the person watching."""
    return (
        f"{run['method']:<22} seed {run['seed']}: {run['before']:.3f} before, {run['last']:.3f} last, "
        f"{run['best']:.3f} best (round {run['best_round']})"
    )


def _row(method: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A method over the seeds: medians."""
    own = [run for run in runs if run["method"] == method]
    row: dict[str, Any] = {"method": method, "seeds": [run["seed"] for run in own]}
    return row | {name: median([run[name] for run in own]) for name in ("before", "last", "best")}


if __name__ == "__main__":
    sys.exit(main())
