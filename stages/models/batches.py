"""Turning ragged token lists into padded microbatches, balanced over ranks. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SHOWN = 8


@dataclass(frozen=True)
class Microbatch:
    """Rows that go through a model together.

    rows: indices into the step's rows, in the order of the batch. is_filler: a row repeated only so that every
    rank runs the same number of forward passes; its loss must be weighted by zero.
    """

    rows: tuple[int, ...]
    is_filler: bool = False


def microbatches(lengths: Sequence[int], *, max_tokens: int, world_size: int = 1) -> list[list[Microbatch]]:
    """Deal rows out over ranks by tokens, then cut each rank's share into microbatches of similar lengths.

    lengths: tokens per row. max_tokens: bound on rows x longest row of one microbatch (a single row may exceed it).
    Returns one list per rank, all of the same length. Depends on nothing but its arguments.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for row in order:
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += lengths[row]
    cut = [_cut(share, lengths, max_tokens) for share in shares]
    most = max(len(batches) for batches in cut)
    for batches in cut:
        while len(batches) < most:
            batches.append(Microbatch(rows=(order[-1],), is_filler=True))
    return cut


def named(step: str, rows: Sequence[Mapping[str, Any]], batches: Sequence[Microbatch]) -> str:
    """For messages: the step, and the prompts of the rows that `batches` hold."""
    ids = sorted({str(rows[index]["prompt_id"]) for batch in batches for index in batch.rows})
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"{step}, prompt_id {', '.join(ids[:_SHOWN])}{more}"


def _cut(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Microbatch]:
    batches: list[Microbatch] = []
    current: list[int] = []
    for row in share:
        longest = lengths[current[0]] if current else lengths[row]
        if current and (len(current) + 1) * longest > max_tokens:
            batches.append(Microbatch(rows=tuple(current)))
            current = []
        current.append(row)
    if current:
        batches.append(Microbatch(rows=tuple(current)))
    return batches


@dataclass(frozen=True)
class TokenBatch:
    """Padded sequences and which of their tokens are completions.

    input_ids_BL: prompt and completion without the last token, right-padded; long.
    select_BL: where the hidden state predicts a completion token; bool.
    targets_N: those completion tokens, row after row; long. lengths: completion tokens per row.
    """

    input_ids_BL: torch.Tensor
    select_BL: torch.Tensor
    targets_N: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, device: torch.device
    ) -> TokenBatch:
        """Pad `prompts` + `completions` (token ids) to the longest."""
        width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True)) - 1
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        select = torch.zeros(len(prompts), width, dtype=torch.bool)
        targets: list[int] = []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            sequence = [*prompt, *completion][:-1]
            input_ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
            select[row, len(prompt) - 1 : len(sequence)] = True
            targets.extend(completion)
        return cls(
            input_ids_BL=input_ids.to(device),
            select_BL=select.to(device),
            targets_N=torch.tensor(targets, dtype=torch.long, device=device),
            lengths=tuple(len(c) for c in completions),
        )


def pad_sequences(sequences: Sequence[Sequence[int]], *, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad whole sequences with zeros. Returns input_ids_BL (long) and last_B, the index of each last token."""
    width = max(len(s) for s in sequences)
    input_ids = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = torch.tensor(list(sequence), dtype=torch.long)
    last = torch.tensor([len(s) - 1 for s in sequences], dtype=torch.long)
    return input_ids.to(device), last.to(device)
