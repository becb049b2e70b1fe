"""The roofline of bench/gpu.py, by hand."""

from __future__ import annotations

import pytest

from bench.gpu_rounds import SHAPES
from bench.roofline import Limits, decode_roofline_seconds, weights_read
from configs.models import FromScratch

# width 32: 4 heads on 2 heads of keys and values
SHAPE = FromScratch(vocabulary=300, hidden=128, layers=2, heads=4, kv_heads=2, mlp=256, max_positions=64)
# query and output 2 x 128 x 128, key and value 2 x 128 x 64, three products of the MLP; twice; and the output embedding
WEIGHTS = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256) + 300 * 128
KV_BYTES = 2 * 2 * 2 * 32 * 4


def test_the_weights_that_a_step_reads() -> None:
    assert weights_read(SHAPE) == WEIGHTS
    assert weights_read(SHAPES["1.5b"]) == pytest.approx(1.54e9, rel=0.01)
    assert weights_read(SHAPES["7b"]) == pytest.approx(7.07e9, rel=0.01), "without the input embedding"


def test_two_sequences_of_which_one_ends_first() -> None:
    """The first token of each comes from its prompt."""
    limits = Limits(bytes_per_second=1000.0, flops_per_second=1e12)
    both = WEIGHTS * 4 + KV_BYTES * (6 + 8)
    alone = WEIGHTS * 4 + KV_BYTES * (7 + 2)
    found = decode_roofline_seconds(SHAPE, [(5, 2), (7, 3)], concurrent=2, dtype_bytes=4, limits=limits)
    assert found == pytest.approx((both + alone) / 1000.0)


def test_a_device_that_computes_slowly_is_bound_by_that() -> None:
    limits = Limits(bytes_per_second=1e15, flops_per_second=10.0)
    found = decode_roofline_seconds(SHAPE, [(5, 2), (7, 3)], concurrent=2, dtype_bytes=4, limits=limits)
    assert found == pytest.approx(2 * WEIGHTS * 3 / 10.0)


def test_a_slot_is_filled_again_as_soon_as_its_sequence_ends() -> None:
    """Two slots, completions of 10, 2 and 2 tokens: nine steps, not eleven."""
    limits = Limits(bytes_per_second=1.0, flops_per_second=1e15)
    found = decode_roofline_seconds(SHAPE, [(0, 2), (0, 10), (0, 2)], concurrent=2, dtype_bytes=4, limits=limits)
    held = sum(range(1, 10)) + 1 + 1
    assert found == pytest.approx(9 * 4 * WEIGHTS + KV_BYTES * held)
