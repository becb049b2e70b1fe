"""Microbatches: every row once, balanced by tokens, full, the same every time; places of tokens by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.models.batches import Cost, Microbatch, TokenBatch, microbatches, minibatches, rollout_cost

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
COSTS = st.lists(
    st.builds(lambda own, prompt: Cost(own, 7 * prompt, prompt or None), st.integers(1, 60), st.integers(0, 5)),
    min_size=1,
    max_size=40,
)


def alone(*lengths: int) -> list[Cost]:
    return [Cost(own=length) for length in lengths]


def tokens(costs: list[Cost], batch: Microbatch) -> int:
    """What a microbatch computes: the rows' own tokens, and each prompt's once."""
    prompts = {costs[row].prompt: costs[row].shared for row in batch.rows if costs[row].prompt is not None}
    return sum(costs[row].own for row in batch.rows) + sum(prompts.values())


@given(COSTS, st.integers(16, 200), st.integers(1, 4))
def test_every_row_once_within_the_limit_and_as_many_batches_on_every_rank(
    costs: list[Cost], max_tokens: int, world_size: int
) -> None:
    ranks = microbatches(costs, max_tokens=max_tokens, world_size=world_size)
    assert len(ranks) == world_size
    assert len({len(batches) for batches in ranks}) == 1
    real = [batch for batches in ranks for batch in batches if not batch.is_filler]
    assert sorted(row for batch in real for row in batch.rows) == list(range(len(costs)))
    assert all(len(batch.rows) == 1 or tokens(costs, batch) <= max_tokens for batch in real)
    for batches in ranks:
        fillers = [batch for batch in batches if batch.is_filler]
        assert all(len(batch.rows) == 1 for batch in fillers)
        assert batches[len(batches) - len(fillers) :] == fillers


@given(LENGTHS, st.integers(2, 4))
def test_ranks_differ_by_at_most_the_longest_row(lengths: list[int], world_size: int) -> None:
    ranks = microbatches(alone(*lengths), max_tokens=64, world_size=world_size)
    loads = [sum(lengths[r] for batch in batches if not batch.is_filler for r in batch.rows) for batches in ranks]
    assert max(loads) - min(loads) <= max(lengths)


@given(LENGTHS)
def test_microbatches_are_more_than_half_full(lengths: list[int]) -> None:
    """Any two of them would not fit into one."""
    sizes = [sum(lengths[r] for r in batch.rows) for batch in microbatches(alone(*lengths), max_tokens=64)[0]]
    assert all(a + b > 64 for i, a in enumerate(sizes) for b in sizes[i + 1 :])


def test_by_hand_one_rank() -> None:
    """9 leaves no room for 5; 5 and 5 fill the next; 3 needs a third."""
    assert microbatches(alone(3, 9, 5, 5), max_tokens=10) == [
        [Microbatch(rows=(1,)), Microbatch(rows=(2, 3)), Microbatch(rows=(0,))]
    ]


def test_a_small_row_goes_where_there_is_room() -> None:
    assert microbatches(alone(9, 5, 5, 1), max_tokens=10) == [[Microbatch(rows=(0, 3)), Microbatch(rows=(1, 2))]]


def test_by_hand_two_ranks() -> None:
    """Longest first, each to the lighter rank, ties to the first: 9, 4, 1 | 8, 5."""
    first, second = microbatches(alone(8, 9, 5, 4, 1), max_tokens=9, world_size=2)
    assert first == [Microbatch(rows=(1,)), Microbatch(rows=(3, 4))]
    assert second == [Microbatch(rows=(0,)), Microbatch(rows=(2,))]


def test_by_hand_two_ranks_with_a_filler() -> None:
    """9 | 8, 5: the first rank repeats the smallest row."""
    first, second = microbatches(alone(8, 9, 5), max_tokens=9, world_size=2)
    assert first == [Microbatch(rows=(1,)), Microbatch(rows=(2,), is_filler=True)]
    assert second == [Microbatch(rows=(0,)), Microbatch(rows=(2,))]


def test_rows_of_one_prompt_stay_together_and_pay_for_it_once() -> None:
    """Two prompts of 6 tokens with completions of 2: 10 each, together, whatever the order of the rows."""
    costs = [Cost(2, 6, "a"), Cost(2, 6, "b"), Cost(2, 6, "a"), Cost(2, 6, "b")]
    assert microbatches(costs, max_tokens=10) == [[Microbatch(rows=(0, 2)), Microbatch(rows=(1, 3))]]
    assert microbatches(costs, max_tokens=20) == [[Microbatch(rows=(0, 2, 1, 3))]]
    assert microbatches(costs, max_tokens=20, world_size=2) == [[Microbatch(rows=(0, 2))], [Microbatch(rows=(1, 3))]]


def test_a_group_over_the_limit_is_cut_and_pays_for_its_prompt_again() -> None:
    costs = [Cost(2, 6, "a")] * 3
    assert microbatches(costs, max_tokens=10) == [[Microbatch(rows=(0, 1)), Microbatch(rows=(2,))]]


def test_one_row_on_two_ranks_gives_the_second_a_filler() -> None:
    assert microbatches(alone(4), max_tokens=100, world_size=2) == [
        [Microbatch(rows=(0,))],
        [Microbatch(rows=(0,), is_filler=True)],
    ]


def test_a_row_over_the_limit_goes_alone() -> None:
    assert microbatches(alone(50, 2, 2), max_tokens=16) == [[Microbatch(rows=(0,)), Microbatch(rows=(1, 2))]]


def test_no_rows_no_batches() -> None:
    assert microbatches([], max_tokens=16, world_size=2) == [[], []]


def test_ragged_groups_are_balanced_within_five_percent() -> None:
    generator = torch.Generator().manual_seed(0)
    costs = [
        Cost(own=int(length), shared=20, prompt=row // 8)
        for row, length in enumerate(torch.randint(16, 257, (256,), generator=generator))
    ]
    ranks = microbatches(costs, max_tokens=4096, world_size=2)
    loads = [sum(tokens(costs, batch) for batch in batches) for batches in ranks]
    assert max(loads) / min(loads) < 1.05
    assert not any(batch.is_filler for batches in ranks for batch in batches)


def test_token_batch_by_hand() -> None:
    """Prompt 5 6, completion 7 8 9: the states of 6, 7, 8 predict 7, 8, 9; the last token is never an input."""
    batch = TokenBatch.of([[5, 6], [4]], [[7, 8, 9], [3]], device=CPU)
    assert batch.packed.input_ids_N.tolist() == [5, 6, 7, 8, 4]
    assert batch.packed.positions_N.tolist() == [0, 1, 2, 3, 0]
    assert batch.select_M.tolist() == [1, 2, 3, 4]
    assert batch.targets_M.tolist() == [7, 8, 9, 3]
    assert batch.lengths == (3, 1)


def test_a_prompt_that_comes_twice_is_there_once() -> None:
    """The state of 6 predicts the first token of both completions; their other tokens go on from position 2."""
    batch = TokenBatch.of([[5, 6], [4], [5, 6]], [[7, 8], [3], [9, 1, 2]], device=CPU)
    assert batch.packed.input_ids_N.tolist() == [5, 6, 7, 4, 9, 1]
    assert batch.packed.positions_N.tolist() == [0, 1, 2, 0, 2, 3]
    assert batch.select_M.tolist() == [1, 2, 3, 1, 4, 5]
    assert batch.targets_M.tolist() == [7, 8, 3, 9, 1, 2]


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1), st.lists(st.integers(1, 9), min_size=1)), min_size=1)
)
def test_each_selected_place_is_one_before_its_target(rows: list[tuple[list[int], list[int]]]) -> None:
    batch = TokenBatch.of([p for p, _ in rows], [c for _, c in rows], device=CPU)
    ids, positions = batch.packed.input_ids_N.tolist(), batch.packed.positions_N.tolist()
    found = zip(batch.select_M.tolist(), batch.targets_M.tolist(), strict=True)
    for prompt, completion in rows:
        whole = [*prompt, *completion]
        for position in range(len(prompt) - 1, len(whole) - 1):
            place, target = next(found)
            assert (ids[place], positions[place], target) == (whole[position], position, whole[position + 1])
    assert len(ids) == sum(len(set_) for set_ in {tuple(p) for p, _ in rows}) + sum(len(c) - 1 for _, c in rows)


@pytest.mark.parametrize(("prompts", "completions"), [([[1]], [[2], [3]]), ([[]], [[2]]), ([[1]], [[]])])
def test_a_row_without_tokens_cannot_be_placed(prompts: list[list[int]], completions: list[list[int]]) -> None:
    with pytest.raises(ValueError):
        TokenBatch.of(prompts, completions, device=CPU)


def test_the_cost_of_a_rollout_is_what_its_batch_computes() -> None:
    rows = [{"prompt_ids": [5, 6], "completion_ids": [7, 8, 9]}, {"prompt_ids": [5, 6], "completion_ids": [3]}]
    batch = TokenBatch.of([r["prompt_ids"] for r in rows], [r["completion_ids"] for r in rows], device=CPU)
    assert tokens([rollout_cost(row) for row in rows], Microbatch(rows=(0, 1))) == len(batch.packed.input_ids_N) == 4


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
def test_minibatches_hold_every_row_once_and_whole_groups(groups: int, size: int, count: int, seed: int) -> None:
    names = [f"0/{row // size}" for row in range(groups * size)]
    dealt = minibatches(names, count=count, seed=seed)
    assert len(dealt) == count
    assert sorted(row for rows in dealt for row in rows) == list(range(len(names)))
    assert all(rows == sorted(rows) for rows in dealt)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= size
    if groups >= count:
        assert all(len({names[row] for row in rows}) * size == len(rows) for rows in dealt)
    assert dealt == minibatches(names, count=count, seed=seed)


def test_minibatches_are_dealt_anew_by_the_seed() -> None:
    names = [str(row) for row in range(64)]
    assert minibatches(names, count=4, seed=1) != minibatches(names, count=4, seed=2)
