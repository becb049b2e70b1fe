"""Rollouts of held-out prompts and their rewards -> evaluation.json: figures with 95 % intervals, and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from stages.artifacts.durable import write_json
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.schemas import REWARDS, ROLLOUTS
from stages.artifacts.shards import by_key, read_rows, same_keys
from stages.artifacts.store import open_artifact
from stages.evaluate_policy.job import EvaluatePolicy
from stages.program import Context
from stages.rewards.statistics import mean_interval

EVALUATION = "evaluation.json"

_RESERVED = ("completion_tokens", "samples")
_COLUMNS = ("prompt_id", "sample_index", "completion_ids", "finish_reason", "prompt", "completion", "answer")


def run(job: EvaluatePolicy, context: Context) -> dict[str, float]:
    """Summarise. Metrics: `<source>_mean`, `mean_completion_tokens`, `truncated_fraction`.

    The samples are the first rollouts in canonical order: the same prompts in every evaluation of a run.
    """
    if context.rank != 0:
        return {}
    directory = open_artifact(job.store, job.inputs.rollouts)
    rollouts = by_key(read_rows(directory, "rollouts", ROLLOUTS, columns=_COLUMNS), where=str(directory))
    rewards = _rewards_by_source(job)
    for source, found in rewards.items():
        if source in _RESERVED:
            raise InputError(f"reward source {source!r}: expected a name other than {', '.join(_RESERVED)}")
        same_keys(rollouts, found, left_name="rollouts", right_name=f"rewards of {source}")
    if not rollouts or not rewards:
        raise GateError(f"{directory}: expected rollouts and rewards to evaluate, found {len(rollouts)} rollouts")
    keys = sorted(rollouts)
    lengths = [len(rollouts[key]["completion_ids"]) for key in keys]
    truncated = fmean(rollouts[key]["finish_reason"] == "length" for key in keys)
    document: dict[str, Any] = {
        source: _figures([found[key]["reward"] for key in keys]) for source, found in rewards.items()
    }
    metrics = {f"{source}_mean": figures["mean"] for source, figures in document.items()}
    metrics |= {"mean_completion_tokens": fmean(lengths), "truncated_fraction": truncated}
    document["completion_tokens"] = _figures(lengths) | {
        "min": min(lengths),
        "max": max(lengths),
        "truncated_fraction": truncated,
    }
    document["samples"] = [
        {name: rollouts[key][name] for name in _COLUMNS if name != "completion_ids"}
        | {"rewards": {source: found[key]["reward"] for source, found in rewards.items()}}
        for key in keys[: job.parameters.samples]
    ]
    write_json(context.out / EVALUATION, document)
    return metrics


def _rewards_by_source(job: EvaluatePolicy) -> dict[str, dict[tuple[str, int], dict[str, Any]]]:
    directory = open_artifact(job.store, job.inputs.rewards)
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(directory, "rewards", REWARDS):
        if not math.isfinite(row["reward"]):
            raise GateError(
                f"reward source {row['source']!r}: expected finite rewards, found {row['reward']} for prompt_id "
                f"{row['prompt_id']}, sample_index {row['sample_index']}"
            )
        rows.setdefault(row["source"], []).append(row)
    return {source: by_key(found, where=f"{directory}, source {source}") for source, found in rows.items()}


def _figures(values: Sequence[float]) -> dict[str, float]:
    mean, low, high = mean_interval(values)
    return {"mean": mean, "low": low, "high": high, "n": len(values)}


if __name__ == "__main__":
    from stages.program import main

    main("evaluate_policy")
