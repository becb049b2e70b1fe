"""Rewards and logprobs -> credit per completion token, in advantages-00000.arrow. Pure; on the CPU, in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.algorithms import Ppo
from stages.artifacts import layout
from stages.artifacts.durable import read_json
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.schemas import ADVANTAGES, LOGPROBS, REWARDS, ROLLOUTS
from stages.artifacts.shards import by_key, read_rows, same_keys, write_table
from stages.artifacts.store import open_artifact
from stages.engines.devices import open_device
from stages.estimate_advantages.credit import RoundBatch, estimate, num_rewarded
from stages.estimate_advantages.job import EstimateAdvantages
from stages.program import Context
from stages.rl.advantages import group_advantages
from stages.rl.credit import Credit
from stages.rl.kl import kl_k1, kl_k3
from stages.rl.masked import explained_variance, masked_mean

_COLUMNS = ("prompt_id", "sample_index", "group_id", "completion_ids", "finish_reason")


def run(job: EstimateAdvantages, context: Context) -> dict[str, float]:
    """Estimate advantages for one round. Gates: same rows everywhere, equal groups, nothing but finite numbers."""
    if context.rank != 0:
        return {}
    open_device(job.compute)
    algorithm, ranks = job.parameters.algorithm, job.parameters.ranks
    batch = _read(job)
    kl_coef = _kl_coef(job)
    credit = estimate(batch, algorithm=algorithm, kl_coef=kl_coef, ranks=ranks)
    _write(batch, credit, rewarded=num_rewarded(batch, algorithm=algorithm, ranks=ranks), context=context)
    return _metrics(batch, credit) | {"kl_coef": kl_coef}


def _kl_coef(job: EstimateAdvantages) -> float:
    """The adaptive controller's value at the round's start: in the trainer state, once an update was made.

    Without a target it never moves, and the state, which is large, is not opened for it.
    """
    algorithm, state = job.parameters.algorithm, job.inputs.state
    if state.is_fresh or algorithm.kl_target is None:
        return algorithm.kl_coef
    path = open_artifact(job.store, state.policy) / "trainer.json"
    value = read_json(path).get("kl_coef")
    if not isinstance(value, float | int) or not math.isfinite(value) or value < 0:
        raise InputError(f"{path}: expected a finite kl_coef of at least 0, found {value!r}")
    return float(value)


def _read(job: EstimateAdvantages) -> RoundBatch:
    """Join the round's three files by key. Raises InputError for missing rows, GateError for bad numbers."""
    directories = {name: open_artifact(job.store, getattr(job.inputs, name)) for name in ("rollouts", "rewards")}
    rollouts = by_key(read_rows(directories["rollouts"], "rollouts", ROLLOUTS, columns=_COLUMNS), where="rollouts")
    totals = [row for row in read_rows(directories["rewards"], "rewards", REWARDS) if row["source"] == "total"]
    rewards = by_key(totals, where="rewards")
    logprobs = by_key(read_rows(open_artifact(job.store, job.inputs.logprobs), "logprobs", LOGPROBS), where="logprobs")
    same_keys(rollouts, rewards, left_name="rollouts", right_name="rewards")
    same_keys(rollouts, logprobs, left_name="rollouts", right_name="logprobs")
    keys = sorted(rollouts)
    if not keys:
        raise GateError(f"{directories['rollouts']}: expected rollouts, found none")
    lengths = [len(rollouts[key]["completion_ids"]) for key in keys]
    for key, length in zip(keys, lengths, strict=True):
        if length == 0:
            raise GateError(f"rollout {_name(key)}: expected at least one completion token, found none")
        refuse_infinite([rewards[key]["reward"]], key=key, column="reward")
    algorithm = job.parameters.algorithm
    after_end = 1 if isinstance(algorithm, Ppo) and algorithm.reward_placement == "first_pad" else 0
    columns = {
        name: _column([logprobs[key][name] for key in keys], name=name, keys=keys, lengths=lengths, after_end=more)
        for name, more in (("old_logprobs", 0), ("ref_logprobs", 0), ("values", after_end))
    }
    if columns["old_logprobs"] is None:
        raise GateError("old_logprobs: expected one per completion token, found empty lists")
    return RoundBatch(
        keys=keys,
        lengths=lengths,
        group_B=_groups([rollouts[key]["group_id"] for key in keys]),
        rewards_B=torch.tensor([rewards[key]["reward"] for key in keys], dtype=torch.float64),
        truncated_B=torch.tensor([rollouts[key]["finish_reason"] == "length" for key in keys]),
        mask_BT=torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
        old_logprobs_BT=columns["old_logprobs"],
        ref_logprobs_BT=columns["ref_logprobs"],
        values_BT=columns["values"],
    )


def _column(
    lists: list[list[float]], *, name: str, keys: list[tuple[str, int]], lengths: list[int], after_end: int = 0
) -> Tensor | None:
    """Right-pad one list column with zeros: [B, T]. None if every list is empty.

    after_end: how many numbers follow those of the tokens; what reaches beyond the longest completion is left out.
    """
    if not any(lists):
        return None
    padded_BT = torch.zeros(len(lists), max(lengths), dtype=torch.float64)
    for row, (values, key, length) in enumerate(zip(lists, keys, lengths, strict=True)):
        if len(values) != length + after_end:
            what = "one per token and one after the last" if after_end else "one per token"
            raise GateError(f"rollout {_name(key)}: expected {length + after_end} {name}, {what}, found {len(values)}")
        refuse_infinite(values, key=key, column=name)
        kept = values[: max(lengths)]
        padded_BT[row, : len(kept)] = torch.tensor(kept, dtype=torch.float64)
    return padded_BT


def _groups(group_ids: list[str]) -> Tensor:
    """Group number of each rollout. Raises GateError if the groups differ in size."""
    sizes: dict[str, int] = defaultdict(int)
    for group_id in group_ids:
        sizes[group_id] += 1
    expected = max(sizes.values())
    for group_id, size in sizes.items():
        if size != expected:
            raise GateError(f"group {group_id}: expected {expected} rollouts as in the others, found {size}")
    numbers = {group_id: number for number, group_id in enumerate(sizes)}
    return torch.tensor([numbers[group_id] for group_id in group_ids])


def refuse_infinite(values: Sequence[float], *, key: tuple[str, int], column: str) -> None:
    """Raise GateError naming the row, the column and the first value that is not finite."""
    for value in values:
        if not math.isfinite(value):
            raise GateError(f"rollout {_name(key)}: expected finite {column}, found {value}")


def _name(key: tuple[str, int]) -> str:
    return f"prompt_id {key[0]}, sample_index {key[1]}"


def _write(batch: RoundBatch, credit: Credit, *, rewarded: list[int], context: Context) -> None:
    """Refuse what is not finite in float32, as which it is stored, and write the file."""
    tensors = {
        "token_rewards": (credit.token_rewards_BT, rewarded),
        "advantages": (credit.advantages_BT, batch.lengths),
        "returns": (credit.returns_BT, rewarded),
    }
    rows = []
    for i, key in enumerate(batch.keys):
        row: dict[str, Any] = {"prompt_id": key[0], "sample_index": key[1]}
        for column, (x_BT, lengths) in tensors.items():
            row[column] = [] if x_BT is None else x_BT[i, : lengths[i]].float().tolist()
            refuse_infinite(row[column], key=key, column=column)
        rows.append(row)
    write_table(layout.shard(context.out, "advantages", 0), rows, ADVANTAGES)


def _metrics(batch: RoundBatch, credit: Credit) -> dict[str, float]:
    """kl_to_ref_mean is k1, nats per token, mean over tokens; rewards are the unshaped totals."""
    mask_BT = batch.mask_BT
    metrics = {
        "reward_mean": batch.rewards_B.mean().item(),
        "reward_std": batch.rewards_B.std(correction=0).item(),
        "advantage_mean": masked_mean(credit.advantages_BT, mask=mask_BT).item(),
        "completion_tokens_mean": sum(batch.lengths) / len(batch.lengths),
        "truncated_fraction": batch.truncated_B.double().mean().item(),
    }
    centred_B = group_advantages(batch.rewards_B, group_B=batch.group_B, scale_by_std=False)
    num_groups = int(batch.group_B.max()) + 1
    if num_groups < len(batch.keys):
        with_signal = set(batch.group_B[centred_B != 0].tolist())
        metrics["zero_signal_group_fraction"] = 1 - len(with_signal) / num_groups
    if batch.ref_logprobs_BT is not None:
        k1_BT = kl_k1(batch.old_logprobs_BT, ref_logprobs=batch.ref_logprobs_BT)
        k3_BT = kl_k3(batch.old_logprobs_BT, ref_logprobs=batch.ref_logprobs_BT)
        metrics["kl_to_ref_mean"] = masked_mean(k1_BT, mask=mask_BT).item()
        metrics["kl_to_ref_k3_mean"] = masked_mean(k3_BT, mask=mask_BT).item()
    if credit.returns_BT is not None and batch.values_BT is not None:
        explained = explained_variance(batch.values_BT, returns_BT=credit.returns_BT, mask_BT=mask_BT)
        metrics["explained_variance"] = explained.item()
    return metrics


if __name__ == "__main__":
    from stages.program import main

    main("estimate_advantages")
