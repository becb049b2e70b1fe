"""The rows that an update trains on: a round's committed files joined by key, refused where a number is missing."""

from __future__ import annotations

import math
from typing import Any

from configs.algorithms import Algorithm, Ppo
from stages.artifacts import schemas
from stages.artifacts.errors import GateError
from stages.artifacts.shards import by_key, read_rows, same_keys
from stages.artifacts.store import open_artifact
from stages.update_policy.job import UpdatePolicy

Row = dict[str, Any]
_OPTIONAL = ("ref_logprobs", "values", "returns")
_COLUMNS = ("old_logprobs", "advantages", *_OPTIONAL)


def joined_rows(job: UpdatePolicy) -> list[Row]:
    """The round's rows in canonical order, files joined by key."""
    tables = {}
    for name, schema in (
        ("rollouts", schemas.ROLLOUTS),
        ("logprobs", schemas.LOGPROBS),
        ("advantages", schemas.ADVANTAGES),
    ):
        directory = open_artifact(job.store, getattr(job.inputs, name))
        tables[name] = by_key(read_rows(directory, name, schema), where=name)
        same_keys(tables["rollouts"], tables[name], left_name="rollouts", right_name=name)
    rows = [
        tables["rollouts"][key] | tables["logprobs"][key] | tables["advantages"][key]
        for key in sorted(tables["rollouts"])
    ]
    _refuse_unusable(rows, job.parameters.settings.algorithm)
    return rows


def _refuse_unusable(rows: list[Row], algorithm: Algorithm) -> None:
    """Gate: rows enough for every optimizer step, and a finite number per completion token in each column."""
    if len(rows) < algorithm.num_minibatches:
        raise GateError(f"expected at least {algorithm.num_minibatches} rollouts, one per minibatch, found {len(rows)}")
    after_end = 1 if isinstance(algorithm, Ppo) and algorithm.reward_placement == "first_pad" else 0
    longer = {"values": (after_end,), "returns": (0, after_end)}
    for row in rows:
        tokens = len(row["completion_ids"])
        for name in _COLUMNS:
            values = row[name]
            allowed = {tokens + more for more in longer.get(name, (0,))} | ({0} if name in _OPTIONAL else set())
            if len(values) not in allowed:
                raise GateError(f"{_key(row)}: expected {tokens} {name}, one per token, found {len(values)}")
            for value in values:
                if not math.isfinite(value):
                    raise GateError(f"{_key(row)}: expected finite {name}, found {value}; no optimizer step was made")


def _key(row: Row) -> str:
    return f"rollout prompt_id {row['prompt_id']}, sample_index {row['sample_index']}"
