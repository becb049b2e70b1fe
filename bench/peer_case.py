"""One case run by one side: ours or the peer, each to the same record. Knows how both are told the same thing."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.flow_run import FlowRun
from bench.peer_environment import Peer
from bench.result import ROOT
from bench.stage_times import of_rounds, rollouts_of, round_ends, stage_times
from bench.watched import run_watched
from configs.load import load_config
from configs.rewards import FunctionSource, VerifierSource
from configs.schema import RunConfig
from stages.artifacts.schemas import PROMPTS
from stages.artifacts.seeds import seed_at
from stages.artifacts.shards import read_rows
from stages.workers import KEPT_MEMORY, PoolSpec

_LOSS = {"token_mean": "dapo", "sequence_mean": "grpo"}


@dataclass(frozen=True)
class Case:
    """goal: of our rollouts per second over the peer's. microbatch: completions per forward pass of the peer."""

    name: str
    config: str
    goal: float
    microbatch: int
    use_vllm: bool = True
    is_ragged: bool = False


CASES = {
    case.name: case
    for case in (
        Case("quickstart", "configs/quickstart_grpo.yaml", goal=1.5, microbatch=128),
        Case("ragged", "bench/ragged.yaml", goal=1.8, microbatch=32, is_ragged=True),
        Case("transformers", "bench/ragged.yaml", goal=3.0, microbatch=32, use_vllm=False, is_ragged=True),
    )
}


@dataclass(frozen=True)
class SideRun:
    """What one run of one side came to.

    round_ends: seconds from the process's start to the end of each round (ours: its policy is committed; the peer's:
    its last optimizer step is done). accuracy: (rollouts trained on, seconds from start, held-out mean).
    """

    rollouts_per_round: int
    wall_seconds: float
    peak_pss_bytes: int
    peak_rss_bytes: int
    round_ends: list[float]
    reward_means: list[float]
    lengths: list[list[int]]
    prompts: list[list[str]]
    accuracy: list[tuple[int, float, float]]
    logs: list[dict[str, float]]

    @property
    def round_seconds(self) -> list[float]:
        """Of each round after the first, which is warm-up."""
        return [later - sooner for sooner, later in pairwise(self.round_ends)]

    @property
    def rollouts_per_second(self) -> float | None:
        """By the median round after warm-up."""
        seconds = self.round_seconds
        return self.rollouts_per_round / statistics.median(seconds) if seconds else None

    @property
    def first_round_seconds(self) -> float | None:
        """From the process's start."""
        return self.round_ends[0] if self.round_ends else None

    @property
    def completion_tokens_mean(self) -> float:
        """Over all rounds."""
        return statistics.fmean(length for lengths in self.lengths for length in lengths)

    def seconds_to(self, target: float) -> float | None:
        """From the process's start to the first evaluation that reaches `target`."""
        return next((seconds for _, seconds, mean in self.accuracy if mean >= target), None)

    def accuracy_above(self, other: SideRun) -> list[tuple[int, float]]:
        """(rollouts trained on, held-out mean of this side less that of the other), where both were evaluated."""
        theirs = {rollouts: mean for rollouts, _, mean in other.accuracy}
        return [(rollouts, mean - theirs[rollouts]) for rollouts, _, mean in self.accuracy if rollouts in theirs]

    def require_the_same_prompts(self, other: SideRun) -> None:
        """Raise SystemExit unless both sides sampled from the same prompts in every round."""
        for index, (here, there) in enumerate(zip(self.prompts, other.prompts, strict=True)):
            if sorted(here) != sorted(there):
                raise SystemExit(
                    f"round {index}: expected the same prompts on both sides, found others; do not compare"
                )

    def document(self) -> dict[str, Any]:
        """As JSON; of lengths their distribution alone."""
        flat = sorted(length for lengths in self.lengths for length in lengths)
        at = {f"p{percent}": flat[min(len(flat) - 1, len(flat) * percent // 100)] for percent in (50, 90, 99)}
        kept = {name: value for name, value in asdict(self).items() if name not in ("lengths", "prompts")}
        return {
            **kept,
            "rollouts_per_second": self.rollouts_per_second,
            "completion_tokens": {"min": flat[0], **at, "max": flat[-1], "mean": statistics.fmean(flat)},
        }

    def line(self) -> str:
        """For a person who waits."""
        speed, first = self.rollouts_per_second or 0.0, self.first_round_seconds or 0.0
        return (
            f"{speed:.1f} rollouts/s, first round after {first:.1f} s, {self.wall_seconds:.1f} s in all, "
            f"{self.peak_pss_bytes / 2**30:.2f} GiB, {self.completion_tokens_mean:.1f} tokens a completion, reward "
            f"{self.reward_means[0]:.3f} -> {self.reward_means[-1]:.3f}"
        )


def run_ours(*, case: Case, run: FlowRun, prepared: Path, rounds: int, evaluate: bool, store: Path) -> SideRun:
    """Our flow from policy_0. It always evaluates before and after: few prompts where accuracy is not asked."""
    overrides = [f"rounds.count={rounds}"]
    overrides += ["evaluation.every=1"] if evaluate else ["evaluation.every=100000", "evaluation.prompts=8"]
    watched = run.from_policy_0(prepared, store, overrides=overrides)
    config = load_config(run.config, overrides=[*run.overrides, *overrides])
    stages = stage_times(store)
    per_round = config.rounds.prompts_per_round * config.rounds.group_size
    generated, scored = of_rounds(stages, "generate_rollouts"), of_rounds(stages, "score_rollouts")
    rows = [rollouts_of(generated[index].path, "prompt", "completion_ids") for index in sorted(generated)]
    metric = f"{config.evaluation.metric}_mean"
    return SideRun(
        rollouts_per_round=per_round,
        wall_seconds=watched.seconds,
        peak_pss_bytes=watched.peak_pss_bytes,
        peak_rss_bytes=watched.peak_rss_bytes,
        round_ends=[at - watched.started_at for at in round_ends(stages)],
        reward_means=[scored[index].metrics["total_mean"] for index in sorted(scored)],
        lengths=[[len(row["completion_ids"]) for row in found] for found in rows],
        prompts=[list(dict.fromkeys(row["prompt"] for row in found)) for found in rows],
        accuracy=[
            ((stage.round_index + 1) * per_round, stage.committed_at - watched.started_at, stage.metrics[metric])
            for stage in stages
            if evaluate and stage.stage == "evaluate_policy"
        ],
        logs=[],
    )


def run_peer(
    *,
    case: Case,
    run: FlowRun,
    prepared: Path,
    rounds: int,
    evaluate: bool,
    directory: Path,
    peer: Peer,
    choices: Mapping[str, Any],
) -> SideRun:
    """The peer from the same policy_0, told the same recipe. choices: what it is free to choose, for speed."""
    config = load_config(run.config, overrides=run.overrides)
    if directory.exists():
        raise SystemExit(f"{directory}: expected nothing there yet; choose another scratch directory or remove it")
    directory.mkdir(parents=True)
    settings = peer_settings(config) | {
        "policy": str(_policy_0(prepared)),
        "scratch": str(directory / "trl"),
        "prompts": str(directory / "prompts.jsonl"),
        "held_out": str(directory / "held_out.jsonl"),
        "events": str(directory / "events.jsonl"),
        "rounds": rounds,
        "evaluate": evaluate,
        "use_vllm": case.use_vllm,
        **choices,
    }
    per_round = config.rounds.prompts_per_round
    batches = [prompts_of(prepared, config.seed, "train", per_round, window=index) for index in range(rounds)]
    _write_lines(directory / "prompts.jsonl", [row for batch in batches for row in batch])
    held_out = prompts_of(prepared, config.seed, "held_out", config.evaluation.prompts, window=0)
    _write_lines(directory / "held_out.jsonl", held_out)
    (directory / "settings.json").write_text(json.dumps(settings, indent=2))
    command = [sys.executable, "-m", "bench.trl_side", str(directory / "settings.json")]
    env = KEPT_MEMORY | peer.environment(run.scratch) | _threads(settings["threads"], choices["wait_policy"])
    watched = run_watched(command, cwd=ROOT, env=env, log=directory / "log")
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    of_kind = {kind: [e for e in events if e["event"] == kind] for kind in ("generated", "round", "evaluated", "log")}
    rollouts = per_round * config.rounds.group_size
    return SideRun(
        rollouts_per_round=rollouts,
        wall_seconds=watched.seconds,
        peak_pss_bytes=watched.peak_pss_bytes,
        peak_rss_bytes=watched.peak_rss_bytes,
        round_ends=[event["at"] - watched.started_at for event in of_kind["round"]],
        reward_means=[event["reward_mean"] for event in of_kind["generated"]],
        lengths=[event["lengths"] for event in of_kind["generated"]],
        prompts=[event["prompts"] for event in of_kind["generated"]],
        accuracy=[
            ((event["round_index"] + 1) * rollouts, event["at"] - watched.started_at, event["mean"])
            for event in of_kind["evaluated"]
        ],
        logs=[event["logs"] for event in of_kind["log"]],
    )


def _threads(count: int, wait_policy: str) -> dict[str, str]:
    """How the peer's OpenMP threads wait: as ours do, but for the policy that it may choose."""
    ours = PoolSpec("trainer", "cpu", 1, count)
    return {
        "OMP_NUM_THREADS": str(count),
        "OMP_WAIT_POLICY": wait_policy,
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", ours.spin_count),
    }


def peer_settings(config: RunConfig) -> dict[str, Any]:
    """Our configuration in the peer's words. Raises SystemExit where it has none for it."""
    algorithm, optimizer = config.algorithm, config.algorithm.policy_optimizer
    if algorithm.name != "grpo" or len(config.rewards) != 1 or config.rounds.group_size < 2:
        raise SystemExit(f"{config.name}: expected grpo with one reward source, found {algorithm.name}")
    (source,) = config.rewards
    match source:
        case VerifierSource(verifier=name, options=options) if not options:
            reward = f"stages.rewards.verifiers:{name}"
        case FunctionSource(function=function):
            reward = function
        case _:
            raise SystemExit(f"{config.name}: expected a plain verifier or a function as reward, found {source.kind}")
    if optimizer.warmup_steps or config.model.dtype != "float32" or config.model.lora is not None:
        raise SystemExit(f"{config.name}: expected float32, no warm-up and no adapters, found something else")
    return {
        "seed": config.seed,
        "threads": config.resources.trainer.threads,
        "reward": reward,
        "prompts_per_round": config.rounds.prompts_per_round,
        "group_size": config.rounds.group_size,
        "num_minibatches": algorithm.num_minibatches,
        "epochs": algorithm.epochs,
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "max_completion_tokens": config.sampling.max_completion_tokens,
        "temperature": config.sampling.temperature,
        "kl_coef": algorithm.kl_coef,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "loss_type": _LOSS[algorithm.aggregation],
        "scale_rewards": "group" if algorithm.scale_by_std else "none",
        "learning_rate": optimizer.learning_rate,
        "betas": optimizer.betas,
        "epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
    }


def prompts_of(store: Path, seed: int, split: str, count: int, *, window: int) -> list[dict[str, Any]]:
    """The window-th batch of `count` prompts as generate_rollouts draws it; the runs are checked against each other."""
    rows = sorted(
        read_rows(_only(store, "prepare_datasets"), f"prompts_{split}", PROMPTS), key=lambda r: r["prompt_id"]
    )
    count = min(count, len(rows))
    epoch, slot = divmod(window, len(rows) // count)
    random.Random(seed_at(seed, "prompt_order", split, epoch)).shuffle(rows)
    return sorted(rows[slot * count : (slot + 1) * count], key=lambda row: row["prompt_id"])


def _policy_0(store: Path) -> Path:
    return _only(store, "train_sft") / "policy"


def _only(store: Path, stage: str) -> Path:
    found = sorted((store / "artifacts" / stage).iterdir())
    if len(found) != 1:
        raise SystemExit(
            f"{store / 'artifacts' / stage}: expected one artifact, found {len(found)}; use a new --scratch"
        )
    return found[0]


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
