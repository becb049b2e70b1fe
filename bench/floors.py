"""`python -m bench.floors`: what a round costs against what its engines alone need for the very same tokens.

Runs the flow, then bare vLLM on the run's prompts and seeds and bare DeepSpeed on its rollouts, and again. On CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.flow_run import WAIT_POLICIES, FlowRun, environment
from bench.machine import machine
from bench.result import ROOT, median, ratio, shown, write_result
from bench.stage_times import StageTime, of_rounds, rollouts_of, round_ends, stage_times
from configs.load import load_config
from configs.schema import RunConfig
from stages.artifacts import layout
from stages.artifacts.seeds import seed_at
from stages.workers import KEPT_MEMORY, PoolSpec

_COLUMNS = ("prompt_id", "sample_index", "prompt_ids", "completion_ids")


def main() -> int:
    """Measure and write the result, again after every repetition."""
    parser = argparse.ArgumentParser(prog="python -m bench.floors", description=__doc__)
    parser.add_argument("--config", default="configs/quickstart_grpo.yaml", help="of a GRPO run")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6, help="of each run; the first is warm-up")
    parser.add_argument("--wait-policy", choices=WAIT_POLICIES, default="PASSIVE", help="of the floors' OpenMP threads")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/floors.json"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    began = machine()
    scratch = asked.scratch or Path(tempfile.mkdtemp(prefix="bench-ratchet-"))
    os.environ["OMP_WAIT_POLICY"] = asked.wait_policy  # the flow pins its workers itself
    overrides = (*asked.overrides, f"rounds.count={asked.rounds}", "evaluation.every=100000", "evaluation.prompts=8")
    run = FlowRun(config=asked.config, overrides=overrides, scratch=scratch)
    config = load_config(asked.config, overrides=list(overrides))
    trainer = config.resources.trainer
    os.environ.setdefault("GOMP_SPINCOUNT", PoolSpec("trainer", "cpu", trainer.ranks, trainer.threads).spin_count)
    prepared = run.until_sft(scratch / "policy-0")
    found = []
    for index in range(asked.repetitions):
        store = scratch / f"floors-{index}"
        run.from_policy_0(prepared, store)
        found.append(_compare(config, store, scratch))
        print(json.dumps(found[-1]["medians"]), flush=True)
        names = found[0]["medians"]
        medians = {
            name: median([f["medians"][name] for f in found if f["medians"][name] is not None]) for name in names
        }
        goals = {"round_by_floors": 1.10, "generation_share": 0.95}
        settings = [asked.config, *asked.overrides]
        write_result(
            asked.out,
            began=began,
            seeds=[config.seed],
            config=settings,
            medians=medians,
            goals=goals,
            repetitions=found,
        )
    print(
        f"round / floors {shown(medians['round_by_floors'])} (goal at most 1.10), with the algorithm's forward passes "
        f"among the floors {shown(medians['round_by_floors_with_forwards'])}; generation at "
        f"{shown(medians['generation_share'])} of bare vLLM (goal 0.95)"
    )
    return 0


def _compare(config: RunConfig, store: Path, scratch: Path) -> dict[str, Any]:
    """One run's stages beside the floors of its rounds, the first round left out."""
    stages = stage_times(store)
    generated = of_rounds(stages, "generate_rollouts")
    rounds = [_round(store, generated[index]) for index in sorted(generated) if index > 0]
    work = store.with_name(f"{store.name}-bare")
    work.mkdir()
    bare = {name: _bare_generation(config, rounds, work, scratch, name) for name in ("defaults", "our_settings")}
    training = _bare_training(config, rounds, work, scratch)
    ends = round_ends(stages)
    measured = {
        "round_seconds": [later - sooner for sooner, later in pairwise(ends)],
        "generate_seconds": [generated[r["round_index"]].seconds for r in rounds],
        "generate_tokens": [generated[r["round_index"]].metrics["generated_tokens"] for r in rounds],
        "stage_seconds": _by_stage(stages),
        "bare_generation": bare,
        "bare_training": training,
    }
    return {"medians": _ratios(config, measured), **measured}


def _by_stage(stages: list[StageTime]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for stage in stages:
        if stage.is_round and stage.round_index > 0:
            found.setdefault(stage.stage, []).append(stage.seconds)
    return found


def _ratios(config: RunConfig, measured: dict[str, Any]) -> dict[str, float | None]:
    """Medians over rounds, and what they come to. Speeds in tokens per second."""
    bare = {
        name: median([r["tokens"] / r["seconds"] for r in rows]) for name, rows in measured["bare_generation"].items()
    }
    fastest = max(speed for speed in bare.values() if speed is not None)
    tokens = median(measured["generate_tokens"])
    assert tokens is not None, "there is at least one round after the first"
    ours = median([t / s for t, s in zip(measured["generate_tokens"], measured["generate_seconds"], strict=True)])
    training = median([r["train_seconds"] for r in measured["bare_training"]])
    forward = median([r["forward_seconds"] for r in measured["bare_training"]])
    assert training is not None and forward is not None, "the floors are of the same rounds"
    passes = 2 if config.algorithm.kl_coef > 0 else 1
    floors = tokens / fastest + training
    round_seconds = median(measured["round_seconds"])
    same = measured["bare_generation"]["our_settings"]
    return {
        "round_seconds": round_seconds,
        "floor_generation_seconds": tokens / fastest,
        "floor_training_seconds": training,
        "floor_forwards_seconds": passes * forward,
        "round_by_floors": ratio(round_seconds, floors),
        "round_by_floors_with_forwards": ratio(round_seconds, floors + passes * forward),
        "generation_tokens_per_second": ours,
        "bare_tokens_per_second_defaults": bare["defaults"],
        "bare_tokens_per_second_our_settings": bare["our_settings"],
        "generation_share": ratio(ours, fastest),
        "same_completions_share": statistics.fmean(r["same_completions"] / r["completions"] for r in same),
    }


def _round(store: Path, stage: StageTime) -> dict[str, Any]:
    """What a floor needs to know of a round: its policy, requests with their seeds, and what was sampled."""
    job = json.loads((stage.path / layout.MANIFEST).read_text())["job"]
    policy = job["inputs"]["policy"]
    rows = rollouts_of(stage.path, *_COLUMNS)
    place = (job["seed"], "generate_rollouts", job["parameters"]["purpose"], stage.round_index)
    return {
        "round_index": stage.round_index,
        "policy": str(layout.artifact(store, policy["stage"], policy["fingerprint"]) / "policy"),
        "prompts": [row["prompt_ids"] for row in rows],
        "completions": [row["completion_ids"] for row in rows],
        "seeds": [seed_at(*place, row["prompt_id"], row["sample_index"]) for row in rows],
    }


def _bare_generation(
    config: RunConfig, rounds: list[Any], work: Path, scratch: Path, name: str
) -> list[dict[str, Any]]:
    generator = config.resources.generator
    tokens = config.data.max_prompt_tokens + config.sampling.max_completion_tokens
    ours = {
        "max_num_seqs": generator.max_concurrent,
        "max_num_batched_tokens": max(8192, tokens),
        "block_size": 32,  # as in stages/engines/vllm_engine.py; same_completions_share tells where they part
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "enforce_eager": generator.eager,
    }
    # vLLM 0.32 for CPU cannot resume a prompt's prefill where requests have seeds of their own
    defaults = {"max_num_seqs": len(rounds[0]["prompts"]), "enable_chunked_prefill": False}
    model = json.loads((Path(rounds[0]["policy"]) / "config.json").read_text())
    settings = {
        "rounds": rounds,
        "dtype": config.model.dtype,
        "max_model_tokens": tokens,
        "max_completion_tokens": config.sampling.max_completion_tokens,
        "temperature": config.sampling.temperature,
        "eos": model["eos_token_id"],
        "engine": ours if name == "our_settings" else defaults,
    }
    threads, space = str(generator.threads), str(generator.kv_cache_gib)
    env = {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": space}
    return _child("bench.bare_generation", settings, work / f"generation-{name}.json", env, scratch, ranks=1)


def _bare_training(config: RunConfig, rounds: list[Any], work: Path, scratch: Path) -> list[dict[str, Any]]:
    trainer = config.resources.trainer
    settings = {
        "rounds": rounds,
        "dtype": config.model.dtype,
        "threads": trainer.threads,
        "zero_stage": trainer.zero_stage,
        "num_minibatches": config.algorithm.num_minibatches,
        "max_tokens": trainer.max_tokens_per_microbatch,
    }
    env = {"OMP_NUM_THREADS": str(trainer.threads), "DS_ACCELERATOR": "cpu"}
    return _child("bench.bare_training", settings, work / "training.json", env, scratch, ranks=trainer.ranks)


def _child(
    module: str, settings: dict[str, Any], path: Path, env: dict[str, str], scratch: Path, *, ranks: int
) -> list[dict[str, Any]]:
    """Run a bare program, one process per rank. Raises SystemExit with the tail of the log of one that fails."""
    path.write_text(json.dumps(settings))
    started = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
        log = path.with_suffix(f".{rank}.log")
        with log.open("wb") as output:
            command = [sys.executable, "-m", module, str(path)]
            own = {**KEPT_MEMORY, **environment(scratch), **env, **(place if module.endswith("training") else {})}
            started.append((subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, stderr=output), log))
    for process, log in started:
        if process.wait() != 0:
            raise SystemExit(f"{module} ended with {process.returncode}; {log} ends:\n{log.read_text()[-3000:]}")
    figures: list[dict[str, Any]] = json.loads(path.with_suffix(".figures.json").read_text())
    return figures


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
