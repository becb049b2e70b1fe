"""A round's batches -> the groups that are trained on: their rollouts and rewards, as one artifact."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from stages.artifacts import layout
from stages.artifacts.errors import GateError
from stages.artifacts.schemas import GROUPS, REWARDS, ROLLOUTS
from stages.artifacts.shards import by_key, read_rows, same_keys, write_table
from stages.artifacts.store import open_artifact
from stages.program import Context
from stages.select_rollouts.job import SelectRollouts
from stages.select_rollouts.selection import Fate, Group, select_groups

Row = dict[str, Any]


def run(job: SelectRollouts, context: Context) -> dict[str, float]:
    """Select groups with a signal from all batches. Metrics: counts, and dropped_group_fraction: without a signal."""
    if context.rank != 0:
        return {}
    parameters = job.parameters
    groups = [group for batch in range(len(job.inputs.rewards)) for group in _groups(job, batch)]
    fates = select_groups(
        groups,
        num_groups=parameters.num_groups,
        min_spread=parameters.min_spread,
        seed=job.seed,
        round_index=parameters.round_index,
    )
    counts = Counter(fates.values())
    if parameters.is_last and not counts["selected"]:
        raise GateError(_nothing_to_learn(job, len(groups)))
    rows = [
        {
            "prompt_id": group.prompt_id,
            "batch": group.batch,
            "lowest": group.lowest,
            "highest": group.highest,
            "fate": fates[group.prompt_id],
        }
        for group in groups
    ]
    write_table(layout.shard(context.out, "groups", 0), rows, GROUPS)
    if parameters.is_last or counts["selected"] == parameters.num_groups:
        _write_selected(job, fates, context)
    return {
        "batches": float(len(job.inputs.rollouts)),
        "groups_sampled": float(len(groups)),
        "groups_selected": float(counts["selected"]),
        "groups_not_needed": float(counts["not_needed"]),
        "dropped_group_fraction": counts["no_signal"] / len(groups),
    }


def _groups(job: SelectRollouts, batch: int) -> list[Group]:
    """The groups of one batch, by prompt_id. Raises GateError unless each is whole."""
    directory, size = open_artifact(job.store, job.inputs.rewards[batch]), job.parameters.group_size
    totals: dict[str, list[float]] = defaultdict(list)
    for row in read_rows(directory, "rewards", REWARDS):
        if row["source"] == "total":
            totals[row["prompt_id"]].append(row["reward"])
    if not totals:
        raise GateError(f"{directory}: expected rewards, found none")
    for prompt_id, rewards in totals.items():
        if len(rewards) != size:
            raise GateError(f"{directory}: expected {size} rewards of prompt_id {prompt_id}, found {len(rewards)}")
    return [Group(prompt_id, batch, min(totals[prompt_id]), max(totals[prompt_id])) for prompt_id in sorted(totals)]


def _nothing_to_learn(job: SelectRollouts, num_groups: int) -> str:
    parameters, batches = job.parameters, len(job.inputs.rollouts)
    return (
        f"round {parameters.round_index}: expected a group whose rewards are more than {parameters.min_spread:g} "
        f"apart, found none among {num_groups} in {batches} batches, so there is nothing to learn from; raise "
        "rounds.group_size or rounds.dynamic_sampling.max_batches, or give prompts or rewards that tell the policy's "
        "completions apart"
    )


def _write_selected(job: SelectRollouts, fates: dict[str, Fate], context: Context) -> None:
    """The selected groups' rows, in canonical order."""
    rollouts: list[Row] = []
    rewards: list[Row] = []
    for of_rollouts, of_rewards in zip(job.inputs.rollouts, job.inputs.rewards, strict=True):
        sampled = read_rows(open_artifact(job.store, of_rollouts), "rollouts", ROLLOUTS)
        scored = read_rows(open_artifact(job.store, of_rewards), "rewards", REWARDS)
        keyed = by_key(sampled, where=str(of_rollouts))
        totals = by_key([row for row in scored if row["source"] == "total"], where=str(of_rewards))
        same_keys(keyed, totals, left_name="rollouts", right_name="rewards")
        rollouts += [row for row in sampled if fates[row["prompt_id"]] == "selected"]
        rewards += [row for row in scored if fates[row["prompt_id"]] == "selected"]
    for rows in (rollouts, rewards):
        rows.sort(key=lambda row: (row["prompt_id"], row["sample_index"]))  # stable: sources keep their order
    write_table(layout.shard(context.out, "rollouts", 0), rollouts, ROLLOUTS)
    write_table(layout.shard(context.out, "rewards", 0), rewards, REWARDS)


if __name__ == "__main__":
    from stages.program import main

    main("select_rollouts")
