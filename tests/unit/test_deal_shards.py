"""Engines have as equal shares of a batch as whole shards allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.generate_rollouts.prompts import deal_shards


def test_equal_shards_go_round() -> None:
    assert deal_shards([7, 7, 7, 7, 7], engines=2) == [[0, 2, 4], [1, 3]]


def test_a_long_shard_stands_alone() -> None:
    assert deal_shards([10, 30, 10, 10], engines=2) == [[1], [0, 2, 3]]


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_each_shard_is_dealt_once_and_no_share_exceeds_another_by_more_than_a_shard(
    tokens: list[int], engines: int
) -> None:
    shares = deal_shards(tokens, engines=engines)
    assert sorted(index for share in shares for index in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(tokens[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens, default=0)
