"""Rollouts and reward sources -> rewards-NNNNN.arrow. Rules are run here, the reward model through stages.models, and
servers are asked through stages.rewards.http.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from configs.rewards import HttpSource, RewardModelSource
from stages.artifacts.durable import read_json
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.schemas import REWARDS
from stages.artifacts.store import open_artifact
from stages.program import Context
from stages.rewards.http import http_rewards
from stages.rewards.options import validate_options
from stages.rewards.sources import rule_rewards
from stages.rollout_shards import by_shard
from stages.score_rollouts.answers import AnswersOfAttempt
from stages.score_rollouts.job import ScoreRollouts

Row = dict[str, Any]
TOTAL = "total"


def run(job: ScoreRollouts, context: Context) -> dict[str, float]:
    """Score every rollout by every source. Metrics: mean and standard deviation per source, mean of the total.

    Rows are in canonical order, sources in the configured one, then `total`: the sum of weight * reward.
    """
    if context.rank != 0:
        return {}
    sources = job.parameters.sources
    for source in sources:
        validate_options(source)
    answers = {s.name: AnswersOfAttempt(context.out, source=s.name) for s in sources if isinstance(s, HttpSource)}
    values: dict[str, list[float]] = {name: [] for name in (*(source.name for source in sources), TOTAL)}

    def score(rollouts: list[Row]) -> list[Row]:
        return _reward_rows(rollouts, _rewards(rollouts, job=job, answers=answers, context=context))

    rollouts = job.inputs.rollouts
    for _, rows in by_shard(job, rollouts, context, kind="rewards", schema=REWARDS, make=score):
        for row in rows:
            values[row["source"]].append(row["reward"])
        for kept in answers.values():
            kept.clear()
    if context.shard is not None:
        return {}
    return {f"{name}_mean": fmean(found) for name, found in values.items()} | {
        f"{name}_std": pstdev(found) for name, found in values.items()
    }


def _rewards(
    rollouts: list[Row], *, job: ScoreRollouts, answers: dict[str, AnswersOfAttempt], context: Context
) -> dict[str, list[float]]:
    """Of each rollout by every source and in total."""
    sources = job.parameters.sources
    rewards: dict[str, list[float]] = {}
    for done, source in enumerate(sources):
        context.progress("sources", done, len(sources))
        if isinstance(source, HttpSource):
            found = http_rewards(source, rollouts, kept=answers[source.name], on_progress=context.progress)
        elif isinstance(source, RewardModelSource):
            found = _score_by_model(source, rollouts, job=job, context=context)
        else:
            found = rule_rewards(source, rollouts, digest=job.parameters.code.get(source.name))
        rewards[source.name] = [_float32(value) for value in found]
    context.progress("sources", len(sources), len(sources))
    rewards[TOTAL] = [
        _float32(math.fsum(source.weight * rewards[source.name][i] for source in sources)) for i in range(len(rollouts))
    ]
    _refuse_infinite(rewards, rollouts)
    return rewards


def _reward_rows(rollouts: list[Row], rewards: dict[str, list[float]]) -> list[Row]:
    return [
        {
            "prompt_id": rollout["prompt_id"],
            "sample_index": rollout["sample_index"],
            "source": source,
            "reward": found[i],
        }
        for i, rollout in enumerate(rollouts)
        for source, found in rewards.items()
    ]


def _score_by_model(
    source: RewardModelSource, rollouts: list[dict[str, Any]], *, job: ScoreRollouts, context: Context
) -> list[float]:
    """Scores of prompt + completion, as sampled: one that was cut (no EOS) is scored as it is."""
    from stages.engines.devices import open_device
    from stages.models.scalar import load_scalar_model, score_sequences

    reference = job.inputs.reward_model
    if reference is None:
        raise InputError(f"reward source {source.name!r}: expected the job to name a reward model, found none")
    directory = open_artifact(job.store, reference)
    key = ("reward_model", reference.fingerprint)
    live: dict[Any, Any] = context.live
    if key not in live:
        for old in [k for k in live if isinstance(k, tuple) and k[0] == "reward_model"]:
            del live[old]
        with context.starting():
            model = load_scalar_model(directory / "reward_model", dtype=job.parameters.dtype)
            live[key] = model.to(open_device(job.compute))
    sequences = [(rollout["prompt_ids"], rollout["completion_ids"]) for rollout in rollouts]
    budget = job.parameters.max_tokens_per_microbatch
    scores: list[float] = score_sequences(
        live[key],
        sequences,
        max_tokens_per_microbatch=budget,
        on_progress=lambda done, total: context.progress(f"scoring by {source.name}", done, total),
        count=context.count,
    ).tolist()
    _refuse_infinite({source.name: scores}, rollouts)
    if source.normalize:
        mean, std = _statistics(directory / "reward_model.json")
        scores = [(score - mean) / std for score in scores]
    if source.clip is not None:
        scores = [max(-source.clip, min(source.clip, score)) for score in scores]
    return scores


def _statistics(path: Path) -> tuple[float, float]:
    document = read_json(path)
    mean, std = document.get("score_mean"), document.get("score_std")
    if not (isinstance(mean, float | int) and isinstance(std, float | int) and math.isfinite(mean)):
        raise GateError(f"{path}: expected finite score_mean and score_std, found {mean!r} and {std!r}")
    if not (math.isfinite(std) and std > 0):
        raise GateError(f"{path}: expected score_std above 0, found {std}; does the model score everything the same?")
    return float(mean), float(std)


def _refuse_infinite(rewards: dict[str, list[float]], rollouts: list[dict[str, Any]]) -> None:
    for name, values in rewards.items():
        if len(values) != len(rollouts):
            raise GateError(f"reward source {name!r}: expected {len(rollouts)} rewards, found {len(values)}")
        for rollout, value in zip(rollouts, values, strict=True):
            if not math.isfinite(value):
                raise GateError(
                    f"reward source {name!r}: expected finite rewards, found {value} for prompt_id "
                    f"{rollout['prompt_id']}, sample_index {rollout['sample_index']}"
                )


def _float32(value: float) -> float:
    """The nearest number that the file can hold, so that a total can be checked from the file alone."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


if __name__ == "__main__":
    from stages.program import main

    main("score_rollouts")
