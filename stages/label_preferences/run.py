"""The program of label_preferences: judged completions of one prompt, ordered by total reward -> preference pairs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.artifacts import schemas
from stages.artifacts.errors import InputError
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.shards import by_key, read_rows, same_keys, write_table
from stages.artifacts.store import open_artifact
from stages.label_preferences.job import LabelPreferences
from stages.program import Context

Row = Mapping[str, Any]
_COLUMNS = ("prompt_id", "sample_index", "prompt", "prompt_ids", "completion", "completion_ids", "finish_reason")


def run(job: LabelPreferences, context: Context) -> dict[str, float]:
    """Write pairs_train-00000.arrow and pairs_held_out-00000.arrow.

    Metrics: `pairs_<part>_rows`, and `prompts_<part>_without_pair`, in rows.
    Raises InputError where a part has no pair, or rollouts and rewards are not of the same rows.
    """
    inputs = job.inputs
    parts = {
        "train": _read_judged(job.store, inputs.rollouts_train, inputs.rewards_train),
        "held_out": _read_judged(job.store, inputs.rollouts_held_out, inputs.rewards_held_out),
    }
    eos = eos_of([row for judged in parts.values() for row in judged])
    metrics: dict[str, float] = {}
    for index, (part, judged) in enumerate(parts.items()):
        pairs, without = make_pairs(judged, pairs_per_prompt=job.parameters.pairs_per_prompt, eos=eos)
        if not pairs:
            raise InputError(
                f"label_preferences: expected at least one pair in the part {part}, found none among {len(judged)} "
                f"completions of {without} prompts: the completions of each prompt have equal rewards or texts, or "
                "were cut; sample more per prompt (data.preferences.group_size) or use another judge"
            )
        write_table(context.out / f"pairs_{part}-00000.arrow", pairs, schemas.PAIRS)
        metrics[f"pairs_{part}_rows"] = float(len(pairs))
        metrics[f"prompts_{part}_without_pair"] = float(without)
        context.progress("parts labelled", index + 1, len(parts))
    return metrics


def make_pairs(judged: Sequence[Row], *, pairs_per_prompt: int, eos: int) -> tuple[list[dict[str, Any]], int]:
    """Preference pairs, and the number of prompts that gave none.

    judged: rollout rows with their total `reward`. Per prompt the pairs of distinct texts with different rewards,
    the largest gap first, at most `pairs_per_prompt`. Completions cut by length have no EOS and are left out; only
    where no pair at all would remain are they used, with EOS set behind them. The result is sorted by prompt_id and
    does not depend on the order of `judged`.
    """
    whole = [row for row in judged if row["finish_reason"] == "stop" and row["completion_ids"][-1:] == [eos]]
    pairs = _pairs_of_all(whole, pairs_per_prompt=pairs_per_prompt)
    if not pairs:
        ended = [{**row, "completion_ids": _ended(row["completion_ids"], eos)} for row in judged]
        pairs = _pairs_of_all(ended, pairs_per_prompt=pairs_per_prompt)
    prompts = {row["prompt_id"] for row in judged}
    return pairs, len(prompts - {pair["prompt_id"] for pair in pairs})


def eos_of(judged: Sequence[Row]) -> int:
    """The token that completions ended by `stop` end in: the most frequent, should there be several.

    Raises InputError if no completion ended by itself.
    """
    stopped = [row["completion_ids"] for row in judged if row["finish_reason"] == "stop" and row["completion_ids"]]
    if not stopped:
        raise InputError(
            f"label_preferences: expected completions that end in EOS, found all {len(judged)} cut by length; "
            "raise sampling.max_completion_tokens"
        )
    counts = Counter(ids[-1] for ids in stopped)
    return int(min(counts, key=lambda token: (-counts[token], token)))


def _pairs_of_all(rows: Sequence[Row], *, pairs_per_prompt: int) -> list[dict[str, Any]]:
    ordered = sorted(rows, key=lambda row: (row["prompt_id"], row["sample_index"]))
    groups = itertools.groupby(ordered, key=lambda row: row["prompt_id"])
    return [pair for _, group in groups for pair in _pairs_of_prompt(list(group))[:pairs_per_prompt]]


def _ended(ids: Sequence[int], eos: int) -> list[int]:
    return list(ids) if ids and ids[-1] == eos else [*ids, eos]


def _pairs_of_prompt(group: Sequence[Row]) -> list[dict[str, Any]]:
    first: dict[str, Row] = {}
    for row in group:
        first.setdefault(row["completion"], row)
    pairs = [
        (better, worse)
        for one, other in itertools.combinations(first.values(), 2)
        for better, worse in ((one, other), (other, one))
        if better["reward"] > worse["reward"] and better["completion"].strip()
    ]
    pairs.sort(key=lambda p: (p[1]["reward"] - p[0]["reward"], p[0]["sample_index"], p[1]["sample_index"]))
    return [
        {
            "prompt_id": better["prompt_id"],
            "prompt": better["prompt"],
            "chosen": better["completion"],
            "rejected": worse["completion"],
            "prompt_ids": better["prompt_ids"],
            "chosen_ids": better["completion_ids"],
            "rejected_ids": worse["completion_ids"],
        }
        for better, worse in pairs
    ]


def _read_judged(store: Path, rollouts: ArtifactRef, rewards: ArtifactRef) -> list[Row]:
    directory, judge = open_artifact(store, rollouts), open_artifact(store, rewards)
    completions = by_key(read_rows(directory, "rollouts", schemas.ROLLOUTS, columns=_COLUMNS), where=str(rollouts))
    totals = by_key(
        [row for row in read_rows(judge, "rewards", schemas.REWARDS) if row["source"] == "total"], where=str(rewards)
    )
    for key, row in totals.items():
        if not math.isfinite(row["reward"]):
            raise InputError(f"{rewards}: row {key}: expected a finite total reward, found {row['reward']}")
    same_keys(completions, totals, left_name=str(rollouts), right_name=str(rewards))
    return [{**row, "reward": totals[key]["reward"]} for key, row in completions.items()]


if __name__ == "__main__":
    from stages.program import main

    main("label_preferences")
