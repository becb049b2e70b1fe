"""The learning rate is a pure function of the step: values by hand for each schedule."""

from __future__ import annotations

import math

import pytest

from configs.models import Optimizer
from stages.engines.schedule import learning_rate


def rate(step: int, *, num_steps: int | None = None, **settings: object) -> float:
    return learning_rate(Optimizer(learning_rate=1.0, **settings), step=step, num_steps=num_steps)  # type: ignore[arg-type]


def test_constant() -> None:
    assert [rate(step) for step in (0, 1, 1000)] == [1.0, 1.0, 1.0]


def test_warm_up_is_linear_and_never_zero() -> None:
    assert [rate(step, warmup_steps=3) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_falls_to_the_final_fraction() -> None:
    found = [rate(step, num_steps=4, schedule="cosine", final_fraction=0.2) for step in range(5)]
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert found == pytest.approx(expected)
    assert (found[0], found[2], found[4]) == pytest.approx((1.0, 0.6, 0.2))


def test_linear_falls_to_the_final_fraction_and_stays() -> None:
    found = [rate(step, num_steps=4, schedule="linear", final_fraction=0.0) for step in range(6)]
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_the_fall_begins_after_the_warm_up() -> None:
    found = [rate(step, num_steps=6, schedule="linear", final_fraction=0.0, warmup_steps=2) for step in range(6)]
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_an_open_end_allows_only_constant() -> None:
    assert rate(10_000, schedule="cosine") == 1.0


def test_more_warm_up_than_steps() -> None:
    assert [rate(step, num_steps=2, schedule="cosine", warmup_steps=9) for step in (0, 1)] == pytest.approx([0.1, 0.2])
