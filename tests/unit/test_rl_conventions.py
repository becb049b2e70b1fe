"""configs/conventions.py in a configuration: each fills in what is not said; ratchet's numbers are the defaults."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from configs.algorithms import Algorithm, Grpo, Mismatch, Ppo
from configs.conventions import GRPO, PPO, ConventionName
from configs.load import ConfigError, load_config
from stages.rl.case import read_case
from stages.rl.reference import evaluate_ppo

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart_grpo.yaml"
PAGE = (ROOT / "docs" / "mathematics.md").read_text(encoding="utf-8")
METHODS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
# What a run cannot choose: all of a round is whitened, rewards lie on the last token, completions have no gaps.
NOT_IN_A_RUN = {"whitening_scope", "reward_placement", "gaps"}


def parse(tree: dict[str, Any]) -> Any:
    return TypeAdapter(Algorithm).validate_python(tree)


def test_every_convention_has_both_methods() -> None:
    assert tuple(PPO) == tuple(GRPO) == get_args(ConventionName)


@pytest.mark.parametrize("name", get_args(ConventionName))
@pytest.mark.parametrize(("kind", "table"), [(Ppo, PPO), (Grpo, GRPO)])
def test_a_convention_fills_in_every_field(name: ConventionName, kind: Any, table: Any) -> None:
    resolved = kind(convention=name).model_dump()
    said = {key: value for key, value in asdict(table[name]).items() if key not in NOT_IN_A_RUN}
    assert {key: resolved[key] for key in said} == said
    assert parse(resolved) == kind(convention=name)  # a resolved configuration is read back as it was


@pytest.mark.parametrize(("kind", "table"), [(Ppo, PPO), (Grpo, GRPO)])
def test_the_declared_defaults_are_ratchets(kind: Any, table: Any) -> None:
    for field in fields(table["ratchet"]):
        if field.name not in NOT_IN_A_RUN:
            assert kind.model_fields[field.name].default == getattr(table["ratchet"], field.name), field.name
    assert kind() == kind(convention="ratchet")


def test_what_is_said_wins_over_the_convention() -> None:
    algorithm = parse({"name": "ppo", "convention": "openrlhf", "kl_coef": 0.3, "whitening": {"eps": 1e-5}})
    assert algorithm.kl_coef == 0.3 and algorithm.gae_lambda == 1.0 and algorithm.reward_clip == 10.0
    assert algorithm.whitening.eps == 1e-5


def test_the_resolver_prints_a_convention_as_numbers() -> None:
    resolved = load_config(QUICKSTART, overrides=["algorithm.convention=verl"]).model_dump(mode="json")["algorithm"]
    assert (resolved["convention"], resolved["dual_clip"], resolved["std_eps"]) == ("verl", 3.0, 1e-6)
    assert resolved["kl_limits"] == {"log_ratio": 20.0, "k1": None, "k2": None, "k3": 10.0}
    assert resolved["kl_coef"] == 0.05  # the file's own


@pytest.mark.parametrize("name", METHODS[1:])
def test_every_method_is_a_name_away(name: str) -> None:
    config = load_config(QUICKSTART, overrides=[f"algorithm={{name: {name}}}"])
    assert config.algorithm.name == name
    assert config.algorithm.max_completion_tokens == config.sampling.max_completion_tokens == 12
    alone = [f"algorithm={{name: {name}}}", "rounds.group_size=1", "rounds.prompts_per_round=512"]
    if config.algorithm.MIN_GROUP_SIZE == 1:
        assert load_config(QUICKSTART, overrides=alone).rounds.group_size == 1
    else:
        with pytest.raises(ConfigError, match=f"rounds.group_size: {name} needs at least 2 rollouts per prompt, found"):
            load_config(QUICKSTART, overrides=alone)


def test_the_methods_are_these() -> None:
    with pytest.raises(ValidationError) as error:
        parse({"name": "none"})
    assert all(f"'{name}'" in str(error.value) for name in METHODS)


def test_the_longest_completion_is_that_of_sampling() -> None:
    given = ["algorithm={name: dapo}", "sampling.max_completion_tokens=10"]
    assert load_config(QUICKSTART, overrides=given).algorithm.max_completion_tokens == 10
    expected = "algorithm.max_completion_tokens: expected that of sampling, 10, found 12; leave it out"
    with pytest.raises(ConfigError, match=expected):
        load_config(QUICKSTART, overrides=[*given, "algorithm.max_completion_tokens=12"])
    with pytest.raises(ConfigError, match=r"sampling.max_completion_tokens: .* found 'many'"):
        load_config(QUICKSTART, overrides=["sampling.max_completion_tokens=many"])


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="form: expected mask for level sequence_mean, found truncate"):
        Mismatch(level="sequence_mean")
    with pytest.raises(ValidationError, match=r"low: expected at most 1, the weight where both agree, found 1.5"):
        Mismatch(low=1.5)
    for wrong in ({"kl_limits": {"k4": 1.0}}, {"kl_limits": {"k1": float("inf")}}, {"convention": "mine"}):
        with pytest.raises(ValidationError):
            parse({"name": "grpo", **wrong})


def shown(value: Any) -> str:
    """A choice as the page writes it."""
    if is_dataclass(value):
        return ", ".join(f"{k} {shown(v)}" for k, v in asdict(value).items() if v is not None) or "none"  # type: ignore[arg-type]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("table", [PPO, GRPO], ids=["ppo", "grpo"])
def test_the_page_shows_every_choice(table: Any) -> None:
    for field in fields(table["ratchet"]):
        row = " | ".join(shown(getattr(table[name], field.name)) for name in ("openrlhf", "verl", "trl", "ratchet"))
        assert f"| `{field.name}` | {row} |\n" in PAGE
    assert all(f"| `{name}` |" in PAGE for name in METHODS)


def test_the_example_of_the_page_is_what_the_program_prints() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    for name in PPO:
        found = evaluate_ppo(read_case(json.loads(text)), PPO[name])
        rewards = "; ".join(", ".join(f"{x:g}" for x in row) for row in found["token_rewards"])
        assert f"| {name} | {rewards} | {found['policy_loss']:.6f} | {found['value_loss']:.6f} |" in PAGE
