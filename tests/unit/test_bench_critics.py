"""bench/critics.py: what is counted, and that its configuration resolves with every start. Measures nothing."""

from __future__ import annotations

import pytest

from bench.critics import STARTS, rounds_to, summary
from configs.algorithms import Ppo
from configs.load import load_config


def test_rounds_to_the_goal() -> None:
    assert rounds_to([0.2, 0.5, 0.6, 0.4], goal=0.6) == 2
    assert rounds_to([0.2, 0.5], goal=0.6) is None
    found = summary([[0.25, 0.5, 0.625], [0.0, 0.5, 0.75]], gain=0.5)
    assert found["rounds_to_goal"] == [2, 1] and found["rounds_to_goal_median"] == 1.5
    assert found["rounds_to_goal_spread"] == [1.0, 2.0] and found["last_accuracy_median"] == pytest.approx(0.6875)
    never = summary([[0.25, 0.5, 0.625], [0.0, 0.1, 0.1]], gain=0.5)
    assert never["rounds_to_goal"] == [2, None] and never["rounds_to_goal_median"] is None


@pytest.mark.parametrize("name", STARTS)
def test_every_start_resolves(name: str) -> None:
    config = load_config("bench/critics.yaml", overrides=[STARTS[name], f"name=critics-{name}"])
    assert isinstance(config.algorithm, Ppo) and config.reward_model is not None
    assert [source.name for source in config.rewards] == ["exact_match"]
