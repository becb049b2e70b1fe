"""The roofline of decoding, by hand, and against a slow count of the same steps."""

from __future__ import annotations

import heapq
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from stages.decoding import Decoding, kv_bytes_per_token, weights_read
from stages.limits import Limits

WEIGHTS, KV_BYTES = 1000, 64


def decoding(lengths: list[tuple[int, int]], *, concurrent: int = 2) -> Decoding:
    return Decoding(lengths, concurrent=concurrent, weights=WEIGHTS, kv_bytes=KV_BYTES, dtype_bytes=4)


def test_two_sequences_of_which_one_ends_first() -> None:
    """The first token of each comes from its prompt."""
    limits = Limits(bytes_per_second=1000.0, flops_per_second=1e12)
    both = WEIGHTS * 4 + KV_BYTES * (6 + 8)
    alone = WEIGHTS * 4 + KV_BYTES * (7 + 2)
    assert decoding([(5, 2), (7, 3)]).least_seconds(limits) == pytest.approx((both + alone) / 1000.0)


def test_a_device_that_computes_slowly_is_bound_by_that() -> None:
    limits = Limits(bytes_per_second=1e15, flops_per_second=10.0)
    assert decoding([(5, 2), (7, 3)]).least_seconds(limits) == pytest.approx(2 * WEIGHTS * 3 / 10.0)


def test_a_slot_is_filled_again_as_soon_as_its_sequence_ends() -> None:
    """Two slots, completions of 10, 2 and 2 tokens: nine steps, not eleven."""
    limits = Limits(bytes_per_second=1.0, flops_per_second=1e15)
    held = sum(range(1, 10)) + 1 + 1
    found = decoding([(0, 2), (0, 10), (0, 2)]).least_seconds(limits)
    assert found == pytest.approx(9 * 4 * WEIGHTS + KV_BYTES * held)


def test_completions_of_one_token_need_no_step() -> None:
    assert decoding([(9, 1), (3, 1)]).least_seconds(Limits(1.0, 1.0)) == 0.0


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=12),
    concurrent=st.integers(1, 5),
)
def test_it_is_the_sum_over_the_steps(lengths: list[tuple[int, int]], concurrent: int) -> None:
    limits = Limits(bytes_per_second=700.0, flops_per_second=300.0)
    running: Counter[int] = Counter()
    held: Counter[int] = Counter()
    free = [0] * concurrent
    for prompt, tokens in sorted(lengths, key=lambda row: -row[1]):
        began = heapq.heappop(free)
        heapq.heappush(free, began + tokens - 1)
        for step in range(1, tokens):
            running[began + step] += 1
            held[began + step] += prompt + step
    expected = sum(
        max((WEIGHTS * 4 + KV_BYTES * held[step]) / 700.0, 2.0 * WEIGHTS * count / 300.0)
        for step, count in running.items()
    )
    assert decoding(lengths, concurrent=concurrent).least_seconds(limits) == pytest.approx(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_step_reads_of_an_exported_policy(tmp_path: Path, tied: bool) -> None:
    """Everything but the input embedding; two heads of keys and values of width 32."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    weights = dict(model.state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()  # the export writes it, tied or not
    model.save_pretrained(tmp_path, state_dict=weights)
    norms = 5 * 128
    per_layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    assert weights_read(tmp_path) == 2 * per_layer + norms + 300 * 128
    assert kv_bytes_per_token(tmp_path, "float32") == 2 * kv_bytes_per_token(tmp_path, "bfloat16") == 2 * 2 * 2 * 32 * 4
