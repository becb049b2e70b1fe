"""Sequences laid end to end without padding, and which of them attend to which. Knows no model.

Rows that begin with the same prompt share its tokens: they are computed once, and every completion attends to them.
Everything but attention sees one long row; attention sees spans, each with the keys before it, either in blocks of
similar shape or one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain

import torch

_WASTE = 1.25
_SMALL_CELLS = 16_384


@dataclass(frozen=True)
class Place:
    """Where a row's tokens lie: its prefix, which other rows may share, and the rest. start and length of each."""

    prefix_start: int
    prefix_length: int
    start: int
    length: int

    @property
    def last(self) -> int:
        """The place of the row's last token."""
        return self.start + self.length - 1 if self.length else self.prefix_start + self.prefix_length - 1

    @property
    def predicting(self) -> list[int]:
        """The places that predict the tokens after the prefix: its own last one, and those of the rest."""
        return [self.prefix_start + self.prefix_length - 1, *range(self.start, self.start + self.length)]


@dataclass(frozen=True)
class Block:
    """Spans of tokens whose attention is computed together, padded to the longest.

    query_SQ, key_SK: places of S spans' queries and keys; the queries are the last of the keys. lengths_S, past_S:
    keys of each span, and how many of them come before its first query.
    """

    query_SQ: torch.Tensor
    key_SK: torch.Tensor
    lengths_S: torch.Tensor
    past_S: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """Which keys a query sees: [S, 1, Q, K], bool. Padded queries see something, so that nothing is NaN."""
        if window not in self.masks:
            device = self.query_SQ.device
            last_SQ = torch.arange(self.query_SQ.shape[1], device=device) + self.past_S[:, None]
            last_SQ = torch.minimum(last_SQ, self.lengths_S[:, None] - 1)
            key_K = torch.arange(self.key_SK.shape[1], device=device)
            seen_SQK = key_K <= last_SQ[:, :, None]
            if window is not None:
                seen_SQK &= key_K > last_SQ[:, :, None] - window
            self.masks[window] = seen_SQK[:, None]
        return self.masks[window]


@dataclass(frozen=True)
class Blocks:
    """All spans, in blocks. inverse_N: each token's place among the blocks' queries, one block after the other."""

    blocks: tuple[Block, ...]
    inverse_N: torch.Tensor


@dataclass(frozen=True)
class Ragged:
    """All spans one after the other, as kernels for variable lengths take them. Queries are the tokens as they lie.

    key_K: the places of the keys, a shared prefix again for each span. query_starts, key_starts: [spans + 1], int32,
    where each span's queries and keys begin and the last ones end. most_queries, most_keys: of one span.
    """

    key_K: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class Packed:
    """N tokens of many rows, each computed once.

    input_ids_N, positions_N: token ids and their positions in their rows; long. spans: what attends together: the
    places before, all of which are seen, and a span's own, of which those up to each token; in the order of the
    tokens, each in one span. places: one per row.
    """

    input_ids_N: torch.Tensor
    positions_N: torch.Tensor
    spans: tuple[tuple[range, range], ...]
    places: tuple[Place, ...]

    @cached_property
    def blocks(self) -> Blocks:
        """The spans gathered into blocks, on the device of the tokens."""
        device = self.input_ids_N.device
        blocks, order = _blocks(self.spans)
        inverse = torch.empty(len(self.input_ids_N), dtype=torch.long)
        where = torch.tensor(order, dtype=torch.long)
        inverse[where[where >= 0]] = torch.arange(len(order))[where >= 0]
        return Blocks(tuple(_block(block, device) for block in blocks), inverse.to(device))

    @cached_property
    def ragged(self) -> Ragged:
        """The spans one after the other, on the device of the tokens."""
        device = self.input_ids_N.device
        queries = [len(own) for _, own in self.spans]
        keys = [len(before) + len(own) for before, own in self.spans]
        starts = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys))
        query_starts, key_starts = (each.to(device) for each in starts)
        places = torch.tensor(list(chain.from_iterable((*before, *own) for before, own in self.spans)))
        return Ragged(places.to(device), query_starts, key_starts, max(queries), max(keys))


def pack(rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, device: torch.device) -> Packed:
    """Lay rows of (prefix, rest) token ids end to end; rows of the same prefix share it. Either part may be empty."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[tuple[range, range]] = []
    prefixes: dict[tuple[int, ...], int] = {}
    places: list[Place] = []
    for prefix, rest in rows:
        key = tuple(prefix)
        if key not in prefixes:
            prefixes[key] = len(ids)
            if key:
                spans.append((range(len(ids), len(ids)), range(len(ids), len(ids) + len(key))))
            ids.extend(key)
            positions.extend(range(len(key)))
        before = range(prefixes[key], prefixes[key] + len(key))
        places.append(Place(before.start, len(key), len(ids), len(rest)))
        if rest:
            spans.append((before, range(len(ids), len(ids) + len(rest))))
        ids.extend(rest)
        positions.extend(range(len(key), len(key) + len(rest)))
    return Packed(
        input_ids_N=torch.tensor(ids, dtype=torch.long).to(device),
        positions_N=torch.tensor(positions, dtype=torch.long).to(device),
        spans=tuple(spans),
        places=tuple(places),
    )


def _blocks(spans: Sequence[tuple[range, range]]) -> tuple[list[list[tuple[range, range]]], list[int]]:
    """Spans of similar shape together, and the token of every query place of all blocks (-1 where padded)."""
    shaped = sorted(spans, key=lambda span: (-len(span[1]), -len(span[0]) - len(span[1]), span[1].start))
    blocks: list[list[tuple[range, range]]] = []
    real, most_queries, most_keys = 0, 0, 0
    for span in shaped:
        queries, keys = len(span[1]), len(span[0]) + len(span[1])
        wide = max(most_queries, queries) * max(most_keys, keys)
        cells = wide * (len(blocks[-1]) + 1) if blocks else 0
        if not blocks or cells > _WASTE * (real + queries * keys) + _SMALL_CELLS:
            blocks.append([])
            real, most_queries, most_keys = 0, 0, 0
        blocks[-1].append(span)
        real += queries * keys
        most_queries, most_keys = max(most_queries, queries), max(most_keys, keys)
    order: list[int] = []
    for block in blocks:
        width = max(len(own) for _, own in block)
        for _, own in block:
            order.extend(own)
            order.extend([-1] * (width - len(own)))
    return blocks, order


def _block(spans: Sequence[tuple[range, range]], device: torch.device) -> Block:
    queries = max(len(own) for _, own in spans)
    keys = max(len(before) + len(own) for before, own in spans)
    query_rows = [[*own, *([own.start] * (queries - len(own)))] for _, own in spans]
    key_rows = [[*before, *own, *([own.start] * (keys - len(before) - len(own)))] for before, own in spans]
    return Block(
        query_SQ=torch.tensor(query_rows, dtype=torch.long).to(device),
        key_SK=torch.tensor(key_rows, dtype=torch.long).to(device),
        lengths_S=torch.tensor([len(before) + len(own) for before, own in spans]).to(device),
        past_S=torch.tensor([len(before) for before, _ in spans]).to(device),
    )
