"""`python -m bench.peer_trl --case quickstart`: TRL's GRPOTrainer against our flow, from the same policy_0, in turns.

Ours is `python -m flows.rlhf` from the command line: Prefect, hashes, flushes, manifests, snapshots. The peer is one
process in its fastest mode here (bench/trl_side.py) that writes nothing down. docs/benchmarks.md says how it is fair.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peer_environment
from bench.flow_run import WAIT_POLICIES, FlowRun
from bench.machine import machine
from bench.peer_case import CASES, Case, SideRun, run_ours, run_peer
from bench.result import median, ratio, shown, write_result
from bench.tales import write_tales

_RAGGED_PROMPTS, _RAGGED_DEMONSTRATIONS = 2000, 2400


@dataclass
class Measured:
    """Everything that has been run so far: pairs of (ours, peer), and what they say together."""

    case: Case
    speed: list[dict[str, SideRun]]
    learning: dict[int, dict[str, SideRun]]
    target: float

    def figures(self) -> dict[str, Any]:
        """As JSON, with medians over the pairs."""
        sides = {side: _medians([pair[side] for pair in self.speed]) for side in ("ours", "peer")}
        ratios = [ratio(p["ours"].rollouts_per_second, p["peer"].rollouts_per_second) for p in self.speed]
        return {
            "case": self.case.name,
            "medians": sides,
            "rollouts_per_second_ratio": median([r for r in ratios if r is not None]),
            "rollouts_per_second_ratio_by_pair": ratios,
            "peak_memory_ratio": ratio(sides["ours"]["peak_pss_bytes"], sides["peer"]["peak_pss_bytes"]),
            "goal": {"rollouts_per_second_ratio": self.case.goal, "peak_memory_ratio": 1.6},
            "accuracy_target": self.target,
            "seconds_to_target": {
                side: {seed: pair[side].seconds_to(self.target) for seed, pair in self.learning.items()}
                for side in ("ours", "peer")
            },
            "accuracy_by_rollouts": {
                side: {seed: pair[side].accuracy for seed, pair in self.learning.items()} for side in ("ours", "peer")
            },
            "accuracy_of_ours_less_peers_by_rollouts": {
                seed: pair["ours"].accuracy_above(pair["peer"]) for seed, pair in self.learning.items()
            },
            "speed_runs": [{side: run.document() for side, run in pair.items()} for pair in self.speed],
            "learning_runs": {
                seed: {side: run.document() for side, run in pair.items()} for seed, pair in self.learning.items()
            },
        }


def _medians(runs: list[SideRun]) -> dict[str, float | None]:
    names = ("rollouts_per_second", "first_round_seconds", "wall_seconds", "peak_pss_bytes", "completion_tokens_mean")
    return {
        name: median([value for run in runs if (value := getattr(run, name)) is not None])
        for name in names
    }  # fmt: skip


def main() -> int:
    """Measure and write the result, again after every pair."""
    asked = _asked()
    case = CASES[asked.case]
    peer = peer_environment.find(asked.peer_path)
    began = machine()
    scratch = asked.scratch or Path(tempfile.mkdtemp(prefix="bench-ratchet-"))
    print(f"scratch: {scratch}", flush=True)
    overrides = list(asked.overrides)
    if case.is_ragged:
        write_tales(scratch / "tales", prompts=_RAGGED_PROMPTS, demonstrations=_RAGGED_DEMONSTRATIONS)
        for role in ("prompts", "demonstrations"):
            overrides.append(f"data.{role}.path={scratch / 'tales' / role}.jsonl")
    measured = Measured(case=case, speed=[], learning={}, target=asked.target)
    out = asked.out or Path(f"bench/results/peer_trl_{case.name}.json")

    choices = {
        "microbatch": asked.peer_microbatch or case.microbatch,
        "engine_dtype": asked.peer_dtype,
        "check_weights": asked.check_weights,
        "wait_policy": asked.wait_policy,
    }

    def pair(name: str, *, seed: int, rounds: int, evaluate: bool, ours_first: bool) -> dict[str, SideRun]:
        ours = FlowRun(config=case.config, overrides=(*overrides, f"seed={seed}"), scratch=scratch)
        prepared = ours.until_sft(scratch / f"policy-0-{seed}")
        given: dict[str, Any] = {
            "case": case,
            "run": ours,
            "prepared": prepared,
            "rounds": rounds,
            "evaluate": evaluate,
        }
        found: dict[str, SideRun] = {}
        for side in ("ours", "peer") if ours_first else ("peer", "ours"):
            directory = scratch / f"{name}-{side}"
            if side == "ours":
                found[side] = run_ours(**given, store=directory)
            else:
                found[side] = run_peer(**given, directory=directory, peer=peer, choices=choices)
            print(f"{name} {side}: {found[side].line()}", flush=True)
        found["ours"].require_the_same_prompts(found["peer"])
        return found

    for index in range(asked.pairs):
        measured.speed.append(
            pair(f"speed-{index}", seed=asked.seed, rounds=asked.rounds, evaluate=False, ours_first=index % 2 == 0)
        )
        write_result(out, began=began, seeds=[asked.seed], peer=peer.versions | choices, **measured.figures())
    for index, seed in enumerate(asked.learning_seeds):
        name, rounds = f"learning-{seed}", asked.learning_rounds
        measured.learning[seed] = pair(name, seed=seed, rounds=rounds, evaluate=True, ours_first=index % 2 == 0)
        seeds = [asked.seed, *measured.learning]
        write_result(out, began=began, seeds=seeds, peer=peer.versions | choices, **measured.figures())
    _verdict(measured)
    return 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peer_trl", description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES), default="quickstart")
    parser.add_argument("--peer-path", type=Path, help=peer_environment.HOW)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side for speed and memory")
    parser.add_argument("--rounds", type=int, default=8, help="of each speed run; the first is warm-up")
    parser.add_argument("--seed", type=int, default=17, help="of the speed runs")
    parser.add_argument("--learning-seeds", type=int, nargs="*", default=[], help="evaluated after every round")
    parser.add_argument("--learning-rounds", type=int, default=10)
    parser.add_argument("--target", type=float, default=0.90, help="held-out accuracy to reach")
    parser.add_argument("--peer-microbatch", type=int, help="completions per forward pass of the peer")
    parser.add_argument("--peer-dtype", choices=["auto", "float32"], default="auto", help="of the peer's engine")
    parser.add_argument("--wait-policy", choices=WAIT_POLICIES, default="PASSIVE", help="of the peer's OpenMP threads")
    parser.add_argument(
        "--check-weights", action="store_true",
        help="let the peer compare its engine's logprobs with its trainer's (its importance-sampling correction)",
    )  # fmt: skip
    parser.add_argument("--scratch", type=Path, help="kept afterwards; policy_0 in it is used again")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration, on both sides")
    return parser.parse_intermixed_args()


def _verdict(measured: Measured) -> None:
    figures, case = measured.figures(), measured.case
    sides = figures["medians"]
    print(
        f"{case.name}: ours {shown(sides['ours']['rollouts_per_second'])}, peer "
        f"{shown(sides['peer']['rollouts_per_second'])} rollouts/s; ratio "
        f"{shown(figures['rollouts_per_second_ratio'])} (goal {case.goal}); memory ratio "
        f"{shown(figures['peak_memory_ratio'])} (goal at most 1.6); first round after "
        f"{shown(sides['ours']['first_round_seconds'])} and {shown(sides['peer']['first_round_seconds'])} s"
    )
    for side, by_seed in figures["seconds_to_target"].items():
        print(f"{side}, seconds to {measured.target}: {by_seed}")


if __name__ == "__main__":
    sys.exit(main())
