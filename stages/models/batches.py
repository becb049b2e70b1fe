"""Turning ragged token lists into packed microbatches, balanced over ranks. Knows no model."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.models.packing import Packed, pack

_SHOWN = 8


@dataclass(frozen=True)
class Microbatch:
    """Rows that go through a model together.

    rows: indices into the step's rows, in the order of the batch. is_filler: a row repeated only so that every
    rank runs the same number of forward passes; its loss must be weighted by zero.
    """

    rows: tuple[int, ...]
    is_filler: bool = False


@dataclass(frozen=True)
class Cost:
    """What a row costs in tokens: `own` always, `shared` once for all rows of the same `prompt` that go together."""

    own: int
    shared: int = 0
    prompt: Hashable = None


def microbatches(costs: Sequence[Cost], *, max_tokens: int, world_size: int = 1) -> list[list[Microbatch]]:
    """Deal rows out over ranks by tokens, and fill each rank's microbatches; rows of one prompt stay together.

    max_tokens: bound on the tokens of one microbatch (a single row may exceed it). Returns one list per rank, all of
    the same length. Depends on nothing but its arguments.
    """
    units = sorted(_units(costs, max_tokens), key=lambda unit: (-unit.tokens, unit.rows))
    shares: list[list[_Unit]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for unit in units:
        rank = loads.index(min(loads))
        shares[rank].append(unit)
        loads[rank] += unit.tokens
    filled = [_fill(share, max_tokens) for share in shares]
    most = max(len(batches) for batches in filled)
    for batches in filled:
        while len(batches) < most:
            batches.append(Microbatch(rows=units[-1].rows[-1:], is_filler=True))
    return filled


def minibatches(groups: Sequence[str], *, count: int, seed: int) -> list[list[int]]:
    """Deal a round's rows out over `count` minibatches, in an order drawn from `seed`; each in canonical order.

    groups: the group of each row. A group stays whole, so that its prompt is computed once in a step and its advantages
    add up to zero there; where there are fewer groups than minibatches, rows are dealt out singly.
    """
    by_group: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        by_group.setdefault(group, []).append(row)
    units = list(by_group.values()) if len(by_group) >= count else [[row] for row in range(len(groups))]
    random.Random(seed).shuffle(units)
    return [sorted(row for unit in units[index::count] for row in unit) for index in range(count)]


def named(step: str, rows: Sequence[Mapping[str, Any]], batches: Sequence[Microbatch]) -> str:
    """For messages: the step, and the prompts of the rows that `batches` hold."""
    ids = sorted({str(rows[index]["prompt_id"]) for batch in batches for index in batch.rows})
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"{step}, prompt_id {', '.join(ids[:_SHOWN])}{more}"


@dataclass(frozen=True)
class _Unit:
    """Rows of one prompt, and what they cost together."""

    rows: tuple[int, ...]
    tokens: int


def _units(costs: Sequence[Cost], max_tokens: int) -> list[_Unit]:
    """The rows by prompt, as many together as fit."""
    by_prompt: dict[Hashable, list[int]] = {}
    for row, cost in enumerate(costs):
        by_prompt.setdefault((row,) if cost.prompt is None else (None, cost.prompt), []).append(row)
    units: list[_Unit] = []
    for rows in by_prompt.values():
        taken: list[int] = []
        tokens = 0
        for row in rows:
            if taken and tokens + costs[row].own > max_tokens:
                units.append(_Unit(tuple(taken), tokens))
                taken = []
            tokens = (tokens if taken else costs[row].shared) + costs[row].own
            taken.append(row)
        units.append(_Unit(tuple(taken), tokens))
    return units


def _fill(share: Sequence[_Unit], max_tokens: int) -> list[Microbatch]:
    """Each unit, largest first, into the first microbatch that has room."""
    batches: list[list[int]] = []
    left: list[int] = []
    for unit in share:
        index = next((i for i, room in enumerate(left) if unit.tokens <= room), len(left))
        if index == len(left):
            batches.append([])
            left.append(max_tokens)
        batches[index].extend(unit.rows)
        left[index] -= unit.tokens
    return [Microbatch(rows=tuple(rows)) for rows in batches]


@dataclass(frozen=True)
class TokenBatch:
    """Prompts with their completions, packed, and which tokens are completions.

    packed: prompt and completion without its last token. select_M: the places whose hidden states predict a completion
    token, row after row; targets_M: those tokens; long. lengths: completion tokens per row.
    """

    packed: Packed
    select_M: torch.Tensor
    targets_M: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, device: torch.device
    ) -> TokenBatch:
        """Pack `prompts` + `completions` (token ids); neither may be empty, a prompt that comes twice is shared."""
        rows = list(zip(prompts, completions, strict=True))
        if not all(prompt and completion for prompt, completion in rows):
            raise ValueError("prompts, completions: expected at least one token in each, found none in one")
        packed = pack([(prompt, completion[:-1]) for prompt, completion in rows], device=device)
        select = [place for row in packed.places for place in row.predicting]
        targets = [token for _, completion in rows for token in completion]
        return cls(
            packed=packed,
            select_M=torch.tensor(select, dtype=torch.long, device=device),
            targets_M=torch.tensor(targets, dtype=torch.long, device=device),
            lengths=tuple(len(completion) for _, completion in rows),
        )


@dataclass(frozen=True)
class ValueBatch:
    """Where a critic is read: before each completion token and, if asked for, after the last.

    select_M: those places of `packed`, row after row; long. lengths: places per row.
    """

    packed: Packed
    select_M: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def after_end(cls, rows: Sequence[Mapping[str, Any]], *, device: torch.device) -> ValueBatch:
        """Whole completions, read once more at the last token: one place more than there are tokens."""
        packed = pack([(row["prompt_ids"], row["completion_ids"]) for row in rows], device=device)
        select = [place for row in packed.places for place in row.predicting]
        select_M = torch.tensor(select, dtype=torch.long, device=device)
        return cls(packed, select_M, tuple(len(row["completion_ids"]) + 1 for row in rows))


def rollout_cost(row: Mapping[str, Any], *, after_end: bool = False) -> Cost:
    """What a row with prompt_ids and completion_ids costs as part of a TokenBatch, or of a ValueBatch.after_end."""
    prompt = tuple(row["prompt_ids"])
    return Cost(own=len(row["completion_ids"]) - (0 if after_end else 1), shared=len(prompt), prompt=prompt)
