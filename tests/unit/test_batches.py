"""Microbatches: every row once, balanced by tokens, bounded, the same every time; positions of tokens by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.models.batches import Microbatch, TokenBatch, microbatches, pad_sequences

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(16, 200), st.integers(1, 4))
def test_every_row_once_within_the_limit_and_as_many_batches_on_every_rank(
    lengths: list[int], max_tokens: int, world_size: int
) -> None:
    ranks = microbatches(lengths, max_tokens=max_tokens, world_size=world_size)
    assert len(ranks) == world_size
    assert len({len(batches) for batches in ranks}) == 1
    real = [batch for batches in ranks for batch in batches if not batch.is_filler]
    assert sorted(row for batch in real for row in batch.rows) == list(range(len(lengths)))
    for batch in real:
        assert len(batch.rows) == 1 or len(batch.rows) * max(lengths[row] for row in batch.rows) <= max_tokens
    for batches in ranks:
        fillers = [batch for batch in batches if batch.is_filler]
        assert all(len(batch.rows) == 1 and lengths[batch.rows[0]] == min(lengths) for batch in fillers)
        assert batches[len(batches) - len(fillers) :] == fillers


@given(LENGTHS, st.integers(2, 4))
def test_ranks_differ_by_at_most_the_longest_row(lengths: list[int], world_size: int) -> None:
    ranks = microbatches(lengths, max_tokens=64, world_size=world_size)
    loads = [sum(lengths[r] for batch in batches if not batch.is_filler for r in batch.rows) for batches in ranks]
    assert max(loads) - min(loads) <= max(lengths)


def test_by_hand_one_rank() -> None:
    assert microbatches([3, 9, 5, 5], max_tokens=10) == [
        [Microbatch(rows=(1,)), Microbatch(rows=(2, 3)), Microbatch(rows=(0,))]
    ]


def test_by_hand_two_ranks() -> None:
    """Longest first, each to the lighter rank, ties to the first: 9, 4, 1 | 8, 5."""
    first, second = microbatches([8, 9, 5, 4, 1], max_tokens=9, world_size=2)
    assert first == [Microbatch(rows=(1,)), Microbatch(rows=(3, 4))]
    assert second == [Microbatch(rows=(0,)), Microbatch(rows=(2,))]


def test_by_hand_two_ranks_with_a_filler() -> None:
    """9 | 8, 5: the first rank repeats the shortest row."""
    first, second = microbatches([8, 9, 5], max_tokens=9, world_size=2)
    assert first == [Microbatch(rows=(1,)), Microbatch(rows=(2,), is_filler=True)]
    assert second == [Microbatch(rows=(0,)), Microbatch(rows=(2,))]


def test_one_row_on_two_ranks_gives_the_second_a_filler() -> None:
    assert microbatches([4], max_tokens=100, world_size=2) == [
        [Microbatch(rows=(0,))],
        [Microbatch(rows=(0,), is_filler=True)],
    ]


def test_a_row_over_the_limit_goes_alone() -> None:
    assert microbatches([50, 2, 2], max_tokens=16) == [[Microbatch(rows=(0,)), Microbatch(rows=(1, 2))]]


def test_no_rows_no_batches() -> None:
    assert microbatches([], max_tokens=16, world_size=2) == [[], []]


@given(LENGTHS)
def test_depends_on_nothing_but_its_arguments(lengths: list[int]) -> None:
    assert microbatches(lengths, max_tokens=64, world_size=2) == microbatches(
        tuple(lengths), max_tokens=64, world_size=2
    )


def test_token_batch_by_hand() -> None:
    """Prompt 5 6, completion 7 8 9: the states of 6, 7, 8 predict 7, 8, 9; the last token is never an input."""
    batch = TokenBatch.of([[5, 6], [4]], [[7, 8, 9], [3]], device=CPU)
    assert batch.input_ids_BL.tolist() == [[5, 6, 7, 8], [4, 0, 0, 0]]
    assert batch.select_BL.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert batch.targets_N.tolist() == [7, 8, 9, 3]
    assert batch.lengths == (3, 1)


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1), st.lists(st.integers(1, 9), min_size=1)), min_size=1)
)
def test_each_selected_position_is_one_before_its_target(rows: list[tuple[list[int], list[int]]]) -> None:
    prompts, completions = [p for p, _ in rows], [c for _, c in rows]
    batch = TokenBatch.of(prompts, completions, device=CPU)
    targets = []
    for row, (prompt, completion) in enumerate(rows):
        whole = [*prompt, *completion]
        assert batch.input_ids_BL[row, : len(whole) - 1].tolist() == whole[:-1]
        assert not batch.input_ids_BL[row, len(whole) - 1 :].any()
        targets.extend(whole[position + 1] for position in batch.select_BL[row].nonzero().flatten().tolist())
    assert targets == batch.targets_N.tolist()
    assert int(batch.select_BL.sum()) == sum(batch.lengths)


def test_a_prompt_without_tokens_cannot_be_placed() -> None:
    with pytest.raises(ValueError):
        TokenBatch.of([[1]], [[2], [3]], device=CPU)


def test_pad_sequences_by_hand() -> None:
    input_ids, last = pad_sequences([[5], [6, 7, 8]], device=CPU)
    assert input_ids.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert last.tolist() == [0, 2]
