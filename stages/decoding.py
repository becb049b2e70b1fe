"""What sampling asks of a device, and the least time in which it could have been done. Measures nothing.

A completion's first token comes from its prompt, which is taken as given. After that each step reads the weights once
and every running sequence's keys and values, and computes two operations per weight and sequence.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from stages.artifacts.model_directory import tensor_shapes
from stages.limits import Limits

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Decoding:
    """Sequences that one engine decoded. lengths: prompt and completion tokens of each. concurrent: how many at a time.

    weights: parameters that a step reads on each device. kv_bytes: of one token's keys and values there. dtype_bytes:
    of one weight.
    """

    lengths: Sequence[tuple[int, int]]
    concurrent: int
    weights: int
    kv_bytes: int
    dtype_bytes: int

    def least_seconds(self, limits: Limits) -> float:
        """The roofline: each step takes as long as the slower of reading and computing.

        The longest completions come first, the next as soon as one ends.
        """
        free = [0] * self.concurrent
        rows = sorted(self.lengths, key=lambda row: -row[1])
        begun = [heapq.heapreplace(free, free[0] + tokens - 1) for _, tokens in rows]
        last = max(free) + 2
        running, offset = np.zeros(last), np.zeros(last)
        for (prompt, tokens), began in zip(rows, begun, strict=True):
            running[began + 1] += 1
            running[began + tokens] -= 1
            offset[began + 1] += prompt - began
            offset[began + tokens] -= prompt - began
        running, offset = np.cumsum(running), np.cumsum(offset)
        held = offset + running * np.arange(last)
        reading = (self.weights * self.dtype_bytes * (running > 0) + self.kv_bytes * held) / limits.bytes_per_second
        return float(np.maximum(reading, 2.0 * self.weights * running / limits.flops_per_second).sum())


def weights_read(policy: Path) -> int:
    """Parameters that a decoding step reads: all of an exported policy's but the input embedding."""
    config = _config(policy)
    total = sum(math.prod(shape) for shape in tensor_shapes(policy).values())
    return total - int(config.vocab_size) * int(config.hidden_size)


def kv_bytes_per_token(policy: Path, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers."""
    config = _config(policy)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * DTYPE_BYTES[dtype])


def _config(policy: Path) -> Any:
    return AutoConfig.from_pretrained(policy, trust_remote_code=False)
