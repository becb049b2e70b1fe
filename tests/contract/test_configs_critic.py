"""Configurations of PPO's critic and of the reward model's loss: what resolves, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.algorithms import Ppo
from configs.load import ConfigError, load_config
from tests.contract.test_configs import SMALL


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    return path


@pytest.mark.parametrize("start", [{"kind": "policy"}, {"kind": "directory", "path": "models/critic"}])
def test_ppo_needs_no_reward_model_unless_its_critic_or_a_reward_does(small: Path, start: dict[str, Any]) -> None:
    config = load_config(small, overrides={"algorithm": {"name": "ppo", "critic": {"initialize_from": start}}})
    assert isinstance(config.algorithm, Ppo) and config.reward_model is None and not config.uses_reward_model
    with_one = {"reward_model": {}, "data.preferences": {"kind": "files", "path": "pairs.jsonl"}}
    assert load_config(small, overrides=with_one | {"algorithm": {"name": "ppo"}}).uses_reward_model


REFUSED: list[tuple[str, list[str], list[str]]] = [
    (
        "ppo whose critic needs a reward model",
        ["algorithm={name: ppo}"],
        ["ppo's critic starts from it", "algorithm.critic.initialize_from.kind to policy or directory"],
    ),
    (
        "a reward model that only a reward asks for",
        ["algorithm={name: ppo, critic: {initialize_from: {kind: policy}}}", "rewards=[{kind: reward_model}]"],
        ["reward_model: expected settings, because a reward source needs it; found none"],
    ),
    (
        "a policy that would never be trained",
        ["algorithm={name: ppo, critic: {initialize_from: {kind: policy}, warmup_rounds: 8}}"],
        ["algorithm.critic.warmup_rounds: expected fewer than the 8 of rounds.count", "found 8"],
    ),
    (
        "a critic from nowhere",
        ["algorithm={name: ppo, critic: {initialize_from: {kind: hub}}}"],
        ["algorithm.ppo.critic.initialize_from", "'hub'", "'reward_model', 'policy', 'directory'"],
    ),
    (
        "a critic for a group method",
        ["algorithm={name: grpo, critic: {warmup_rounds: 1}}"],
        ["algorithm.grpo.critic", "unknown key"],
    ),
    (
        "labels that are wrong half of the time",
        ["reward_model={label_smoothing: 0.5}"],
        ["reward_model.label_smoothing", "less than 0.5", "0.5"],
    ),
    ("a margin below zero", ["reward_model={margin: -1}"], ["reward_model.margin", "greater than or equal to 0", "-1"]),
]


@pytest.mark.parametrize(("overrides", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_with_key_value_and_expectation(small: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(small, overrides=overrides)
    for word in words:
        assert word in str(caught.value)
