"""The least time in which a device can decode, from what it copies and multiplies per second. Measures nothing."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from configs.models import FromScratch


@dataclass(frozen=True)
class Limits:
    """What a device does, measured: bytes per second copied (read and written), operations per second."""

    bytes_per_second: float
    flops_per_second: float


def weights_read(shape: FromScratch) -> int:
    """Parameters that a decoding step reads: every layer's, and the output embedding."""
    width = shape.hidden // shape.heads
    attention = shape.hidden * (shape.hidden + width * (shape.kv_heads or shape.heads)) * 2
    return shape.layers * (attention + 3 * shape.hidden * shape.mlp) + shape.vocabulary * shape.hidden


def decode_roofline_seconds(
    shape: FromScratch, lengths: Sequence[tuple[int, int]], *, concurrent: int, dtype_bytes: int, limits: Limits
) -> float:
    """The least time in which `lengths` (prompt and completion tokens of each rollout) can be decoded.

    `concurrent` sequences run at a time, the longest first, the next as soon as one ends. A completion's first token
    comes from its prompt, which is taken as given. Each step reads the weights once and every running sequence's keys
    and values, and computes two operations per weight and sequence; it takes as long as the slower of the two.
    """
    weights, width = weights_read(shape), shape.hidden // shape.heads
    kv_bytes = 2 * shape.layers * (shape.kv_heads or shape.heads) * width * dtype_bytes
    sequences: Counter[int] = Counter()
    tokens_held: Counter[int] = Counter()
    free = [0] * concurrent
    for prompt, tokens in sorted(lengths, key=lambda row: -row[1]):
        began = heapq.heappop(free)
        heapq.heappush(free, began + tokens - 1)
        for step in range(1, tokens):
            sequences[began + step] += 1
            tokens_held[began + step] += prompt + step
    seconds = 0.0
    for step, running in sequences.items():
        read = weights * dtype_bytes + kv_bytes * tokens_held[step]
        seconds += max(read / limits.bytes_per_second, 2.0 * weights * running / limits.flops_per_second)
    return seconds
