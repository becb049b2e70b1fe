"""Sequences laid end to end without padding, and the attention that keeps them apart.

Rows that begin with the same prompt share its tokens: they are computed once, and every completion attends to them.
Everything but attention sees one long row; attention sees blocks of similar shape. Exact, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from stages.artifacts.errors import InputError

NAME = "ratchet_packed"
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
class Packed:
    """N tokens of many rows, each computed once.

    input_ids_N, positions_N: token ids and their positions in their rows; long. blocks: what attends to what.
    inverse_N: each token's place among the blocks' queries, one block after the other. places: one per row.
    """

    input_ids_N: torch.Tensor
    positions_N: torch.Tensor
    blocks: tuple[Block, ...]
    inverse_N: torch.Tensor
    places: tuple[Place, ...]


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
    blocks, order = _blocks(spans)
    inverse = torch.empty(len(ids), dtype=torch.long)
    where = torch.tensor(order, dtype=torch.long)
    inverse[where[where >= 0]] = torch.arange(len(order))[where >= 0]
    return Packed(
        input_ids_N=torch.tensor(ids, dtype=torch.long).to(device),
        positions_N=torch.tensor(positions, dtype=torch.long).to(device),
        blocks=tuple(_block(block, device) for block in blocks),
        inverse_N=inverse.to(device),
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


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packed | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention inside the rows of `packing`, in the form that transformers calls: [1, heads, N, width] each.

    Returns [1, N, heads, width]. Raises InputError for a family of models whose attention needs more than this.
    """
    unknown = sorted(k for k in ("softcap", "s_aux", "position_bias") if others.get(k) is not None)
    if packing is None or unknown:
        needs = f"it uses {', '.join(unknown)}" if unknown else "it does not hand its arguments on to attention"
        raise InputError(f"{type(module).__name__}: expected plain causal attention, found that {needs}")
    query_NHW, key_NHW, value_NHW = (x[0].transpose(0, 1) for x in (query, key, value))
    grouped = query_NHW.shape[1] != key_NHW.shape[1]
    outputs = []
    for block in packing.blocks:
        out_SHQW = scaled_dot_product_attention(
            _gather(query_NHW, block.query_SQ),
            _gather(key_NHW, block.key_SK),
            _gather(value_NHW, block.key_SK),
            attn_mask=block.mask(sliding_window),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(out_SHQW.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, packing.inverse_N).unsqueeze(0), None


def _gather(x_NHW: torch.Tensor, places_SL: torch.Tensor) -> torch.Tensor:
    """[N, heads, width], [S, L] -> [S, heads, L, width]."""
    picked = x_NHW.index_select(0, places_SL.flatten())
    return picked.view(*places_SL.shape, *x_NHW.shape[1:]).transpose(1, 2)


def hidden_states(decoder: nn.Module, packed: Packed) -> torch.Tensor:
    """The last hidden state of every token: [N, hidden]. `decoder` comes from a model that use_packing() was given."""
    output = decoder(
        input_ids=packed.input_ids_N.unsqueeze(0),
        position_ids=packed.positions_N.unsqueeze(0),
        use_cache=False,
        packing=packed,
    )
    hidden_ND: torch.Tensor = output.last_hidden_state[0]
    return hidden_ND


def use_packing(model: PreTrainedModel) -> None:
    """Let `model` compute its attention by packed_attention, and only so. Raises InputError where it cannot."""
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise InputError(f"{type(model).__name__}: expected a family that takes an attention function, found one fixed")


AttentionInterface.register(NAME, packed_attention)
