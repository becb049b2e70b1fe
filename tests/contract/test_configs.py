"""Configurations: every shipped file resolves, and every bad one is refused with key, value and expectation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.algorithms import Grpo, Ppo
from configs.load import ConfigError, load_config
from configs.models import FromScratch, Pretrained
from configs.rewards import VerifierSource
from configs.sources import FileSource, SortDigitsSource
from stages.rewards.options import validate_options

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
REAL_MODELS = {
    "llama_8b_8x80gb.yaml",
    "qwen_7b_1x80gb_lora.yaml",
    "qwen_7b_2x40gb_lora.yaml",
    "qwen_7b_2x24gb_lora.yaml",
}

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"prompts": {"kind": "sort_digits"}, "demonstrations": {"kind": "sort_digits"}},
    "model": {"base": {"kind": "from_scratch"}},
    "algorithm": {"name": "grpo"},
    "rewards": [{"kind": "verifier", "verifier": "exact_match"}],
    "rounds": {"group_size": 4},
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.yaml", SMALL)


def write(path: Path, tree: Any) -> Path:
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return path


# Shipped files


def test_the_promised_files_ship() -> None:
    promised = {"hh_reward_model.yaml", "hh_ppo.yaml", "countdown_grpo.yaml", "svamp_grpo.yaml", "gsm8k_grpo.yaml"}
    assert promised | REAL_MODELS <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_file_resolves(path: Path) -> None:
    config = load_config(path)
    assert load_config(path) == config
    assert type(config).model_validate(config.model_dump(mode="json")) == config
    for source in (*config.rewards, *config.evaluation.rewards):
        if isinstance(source, VerifierSource):
            validate_options(source)
    rollouts = config.rounds.prompts_per_round * config.rounds.group_size
    assert rollouts % config.algorithm.num_minibatches == 0
    longest = config.data.max_prompt_tokens + config.sampling.max_completion_tokens
    assert longest <= config.resources.trainer.max_tokens_per_microbatch


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_file_says_why(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_shipped_names_are_distinct() -> None:
    names = [load_config(path).name for path in SHIPPED]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("path", [p for p in SHIPPED if p.name not in REAL_MODELS], ids=lambda path: path.name)
def test_laptop_configurations_need_no_gpu_and_no_hub(path: Path) -> None:
    config = load_config(path)
    assert not config.resources.trainer.gpus and not config.resources.generator.gpus
    assert isinstance(config.model.base, FromScratch)
    sources = (config.data.prompts, config.data.demonstrations, config.data.preferences)
    assert not any(isinstance(source, FileSource) and source.hub for source in sources)


@pytest.mark.parametrize("name", sorted(REAL_MODELS))
def test_real_model_configurations(name: str) -> None:
    config = load_config(CONFIGS / name)
    assert isinstance(config.model.base, Pretrained)
    assert config.sft is None and config.model.dtype == "bfloat16" and config.model.gradient_checkpointing
    assert 0.85 <= config.resources.generator.gpu_memory_utilization <= 0.9
    if "lora" in name:
        assert config.model.lora is not None and config.model.lora.rank == 64
        assert config.data.max_prompt_tokens + config.sampling.max_completion_tokens <= 2048
    else:
        assert isinstance(config.algorithm, Ppo)
        assert config.resources.trainer.zero_stage == 3 and config.resources.trainer.offload_optimizer
        assert len(config.resources.trainer.gpus) + len(config.resources.generator.gpus) == 8


def test_data_paths_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_DATA", "/somewhere")
    source = load_config(CONFIGS / "countdown_grpo.yaml").data.prompts
    assert isinstance(source, FileSource) and source.path == "/somewhere/countdown_synthetic/*.jsonl"
    monkeypatch.delenv("RATCHET_DATA")
    source = load_config(CONFIGS / "countdown_grpo.yaml").data.prompts
    assert isinstance(source, FileSource) and source.path == "data/countdown_synthetic/*.jsonl"


def test_hh_ppo_shares_everything_up_to_the_reward_model() -> None:
    ppo, reward_model = (load_config(CONFIGS / name) for name in ("hh_ppo.yaml", "hh_reward_model.yaml"))
    for part in ("data", "model", "sft", "reward_model", "seed"):
        assert getattr(ppo, part) == getattr(reward_model, part), part


# Overrides, extends, environment


def test_overrides_as_text(small: Path) -> None:
    config = load_config(small, overrides=["algorithm.kl_coef=0.02", "rounds.count=3", "resources.trainer.gpus=[2]"])
    assert config.algorithm.kl_coef == 0.02
    assert config.rounds.count == 3
    assert config.resources.trainer.gpus == (2,)


def test_overrides_as_mapping(small: Path) -> None:
    config = load_config(small, overrides={"seed": 5, "rewards.0.weight": 0.5, "data.prompts.rows": 64})
    assert config.seed == 5
    assert config.rewards[0].weight == 0.5
    assert isinstance(config.data.prompts, SortDigitsSource) and config.data.prompts.rows == 64


def test_last_override_wins_and_null_is_none(small: Path) -> None:
    config = load_config(small, overrides=["seed=1", "seed=2", "model.lora={rank: 4}", "model.lora=null"])
    assert config.seed == 2 and config.model.lora is None


def test_an_engine_on_a_gpu_uses_graphs_unless_told_otherwise(small: Path) -> None:
    def is_eager(*overrides: str) -> bool:
        return load_config(small, overrides=list(overrides)).resources.generator.eager

    on_gpu = "resources.generator.gpus=[0]"
    assert is_eager() and not is_eager(on_gpu) and is_eager(on_gpu, "resources.generator.eager=true")


def test_an_override_leaves_the_file_alone(small: Path) -> None:
    before = load_config(small)
    load_config(small, overrides=["seed=99"])
    assert load_config(small) == before


def test_extends_merges_deeply_and_replaces_lists(small: Path) -> None:
    child = {
        "extends": "small.yaml",
        "name": "child",
        "rounds": {"count": 2},
        "rewards": [{"kind": "verifier", "verifier": "position_match"}],
    }
    config = load_config(write(small.with_name("child.yaml"), child))
    assert (config.name, config.rounds.count, config.rounds.group_size) == ("child", 2, 4)
    assert [source.name for source in config.rewards] == ["position_match"]


def test_extends_twice_and_from_another_folder(small: Path) -> None:
    write(small.with_name("middle.yaml"), {"extends": "small.yaml", "seed": 3})
    (small.parent / "deep").mkdir()
    config = load_config(write(small.parent / "deep" / "leaf.yaml", {"extends": "../middle.yaml", "name": "leaf"}))
    assert (config.name, config.seed) == ("leaf", 3)


def test_another_variant_replaces_the_base_instead_of_mixing(small: Path) -> None:
    write(small.with_name("a.yaml"), SMALL | {"algorithm": {"name": "grpo", "scale_by_std": True}})
    change = {"algorithm": {"name": "ppo"}, "data": {"preferences": {"kind": "files", "path": "pairs.jsonl"}}}
    child = write(small.with_name("b.yaml"), {"extends": "a.yaml", "reward_model": {}} | change)
    assert load_config(child).algorithm == Ppo(max_completion_tokens=16)


def test_environment_with_and_without_default(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(small, SMALL | {"store": "${RATCHET_TEST_STORE:-here}/x/${RATCHET_TEST_OTHER:-y}"})
    assert load_config(path).store == "here/x/y"
    monkeypatch.setenv("RATCHET_TEST_STORE", "there")
    assert load_config(path).store == "there/x/y"


def test_a_config_is_immutable(small: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(small).seed = 1  # type: ignore[misc]


def test_defaults_of_the_algorithms(small: Path) -> None:
    algorithm = load_config(small).algorithm
    assert isinstance(algorithm, Grpo) and algorithm.clip_high == 0.28 and algorithm.kl_coef == 0.0


# What is refused: overrides on the small configuration, and every word that the message must hold

REFUSED: list[tuple[str, list[str], list[str]]] = [
    ("misspelt key", ["rounds.cuont=3"], ["rounds.cuont", "unknown key"]),
    ("misspelt nested key", ["algorithm.kl_ceof=0.1"], ["algorithm.grpo.kl_ceof", "unknown key"]),
    ("misspelt top key", ["sede=1"], ["sede", "unknown key"]),
    ("negative count", ["rounds.count=0"], ["rounds.count", "greater than or equal to 1", "0"]),
    ("text for a number", ["rounds.count=many"], ["rounds.count", "integer", "'many'"]),
    ("fraction for a count", ["rounds.count=2.5"], ["rounds.count", "integer", "2.5"]),
    ("nan", ["sampling.temperature=.nan"], ["sampling.temperature", "finite", "nan"]),
    ("infinite weight", ["rewards.0.weight=.inf"], ["rewards.0.verifier.weight", "finite", "inf"]),
    ("zero temperature", ["sampling.temperature=0"], ["sampling.temperature", "greater than 0", "0"]),
    ("unknown algorithm", ["algorithm={name: dpo}"], ["algorithm", "'dpo'", "'ppo', 'grpo'"]),
    ("no algorithm", ["algorithm=null"], ["algorithm", "None"]),
    ("unknown verifier", ["rewards.0.verifier=vibes"], ["rewards.0.verifier.verifier", "exact_match", "'vibes'"]),
    ("unknown kind of reward", ["rewards.0.kind=magic"], ["rewards.0", "'magic'", "'reward_model'"]),
    ("no rewards", ["rewards=[]"], ["rewards", "at least 1 item"]),
    (
        "two rewards of one name",
        ["rewards=[{kind: verifier, verifier: length}, {kind: verifier, verifier: length}]"],
        ["rewards", "distinct names", "['length', 'length']"],
    ),
    (
        "a function without a module",
        ["rewards=[{kind: function, function: my_rule}]"],
        ["rewards.0.function.function", "module:function", "'my_rule'"],
    ),
    (
        "a function that is code",
        ["rewards=[{kind: function, function: 'os:system(1)'}]"],
        ["rewards.0.function.function", "module:function", "'os:system(1)'"],
    ),
    (
        "dynamic sampling without groups",
        ["algorithm={name: reinforce_pp}", "rounds.dynamic_sampling={}"],
        ["rounds.dynamic_sampling", "compares the rollouts of a group", "found reinforce_pp"],
    ),
    (
        "dynamic sampling of the next round",
        ["rounds.dynamic_sampling={}", "rounds.staleness=1", "rounds.group_size=4"],
        ["rounds.staleness: expected 0 with rounds.dynamic_sampling", "found 1"],
    ),
    (
        "dynamic sampling of nothing",
        ["rounds.dynamic_sampling={max_batches: 0}"],
        ["rounds.dynamic_sampling.max_batches", "greater than or equal to 1", "0"],
    ),
    ("grpo without groups", ["rounds.group_size=1"], ["rounds.group_size", "at least 2", "found 1"]),
    (
        "more minibatches than rollouts",
        ["rounds.prompts_per_round=1", "algorithm.num_minibatches=9"],
        ["algorithm.num_minibatches", "at most 4", "found 9"],
    ),
    ("sft without demonstrations", ["data.demonstrations=null"], ["data.demonstrations", "expected a source", "none"]),
    ("from scratch without sft", ["sft=null"], ["sft", "from scratch", "model.base.path"]),
    ("ppo without a reward model", ["algorithm={name: ppo}"], ["reward_model", "expected settings", "found none"]),
    ("reward model without pairs", ["reward_model={}"], ["data.preferences", "expected a source", "found none"]),
    (
        "reward model judging its own pairs",
        [
            "reward_model={}",
            "data.preferences={kind: policy_samples, judge: [{kind: reward_model}]}",
        ],
        ["data.preferences.judge", "cannot judge"],
    ),
    ("metric that is not measured", ["evaluation.metric=bleu"], ["evaluation", "'bleu'", "['exact_match']"]),
    (
        "sequences longer than the model",
        ["model.base.max_positions=100", "sampling.max_completion_tokens=60"],
        ["model.base.max_positions", "at least 128", "found 100"],
    ),
    ("heads that do not divide", ["model.base.heads=5"], ["model.base.from_scratch", "hidden / heads", "192 / 5"]),
    ("vocabulary below the bytes", ["model.base.vocabulary=100"], ["model.base.from_scratch.vocabulary", "260", "100"]),
    ("a base of no kind", ["model.base={path: somewhere}"], ["model.base", "kind"]),
    (
        "a schedule without an end",
        ["algorithm.policy_optimizer={learning_rate: 1.0e-5, schedule: cosine}"],
        ["policy_optimizer", "expected constant", "cosine"],
    ),
    ("unknown dtype", ["model.dtype=float16"], ["model.dtype", "'bfloat16'", "'float16'"]),
    (
        "fewer GPUs than ranks",
        ["resources.trainer.ranks=2", "resources.trainer.gpus=[0]"],
        ["resources.trainer", "one GPU per rank", "1 entries", "ranks is 2"],
    ),
    (
        "one GPU for two",
        ["resources.trainer.gpus=[0]", "resources.generator.gpus=[0]"],
        ["resources", "GPUs [0]", "separate devices", "take_turns"],
    ),
    (
        "turns without ZeRO",
        ["resources.take_turns=true", "resources.trainer.zero_stage=0"],
        ["resources", "take_turns needs trainer.zero_stage 1, 2 or 3", "found 0"],
    ),
    (
        "both at work on what they share",
        ["rounds.staleness=1", "resources.take_turns=true"],
        ["rounds.staleness", "expected 0 with resources.take_turns", "found 1"],
    ),
    (
        "one policy where two are needed",
        ["rounds.staleness=1", "retention.policies=1"],
        ["retention.policies", "at least 2", "rounds.staleness", "found 1"],
    ),
    ("a lag of two rounds", ["rounds.staleness=2"], ["rounds.staleness", "0 or 1", "2"]),
    (
        "engines without GPUs enough",
        ["resources.generator.engines=2", "resources.generator.gpus=[0]"],
        ["resources.generator", "= 2 GPUs", "found 1"],
    ),
    ("zero stage 4", ["resources.trainer.zero_stage=4"], ["resources.trainer.zero_stage", "0, 1, 2 or 3", "4"]),
    (
        "parameters offloaded without zero 3",
        ["resources.trainer.offload_parameters=true"],
        ["resources.trainer", "zero_stage 3", "found 1"],
    ),
    ("all data held out", ["data.held_out_fraction=1.0"], ["data.held_out_fraction", "less than 1", "1.0"]),
    (
        "digits out of order",
        ["data.prompts.min_digits=9"],
        ["data.prompts.sort_digits", "min_digits (9)", "max_digits (8)"],
    ),
    ("unknown source", ["data.prompts={kind: sql}"], ["data.prompts", "'sql'", "'files'"]),
    ("an empty path", ["data.prompts={kind: files, path: ''}"], ["data.prompts.files.path", "at least 1 character"]),
    (
        "a column that means nothing",
        ["data.prompts={kind: files, path: a.jsonl, columns: {question: q}}"],
        ["data.prompts.files.columns.question", "'prompt'", "'question'"],
    ),
    ("negative seed", ["seed=-1"], ["seed", "greater than or equal to 0", "-1"]),
    ("seed beyond 31 bits", ["seed=2147483648"], ["seed", "less than 2147483648", "2147483648"]),
    ("a name that is no file name", ["name=../up"], ["name", "pattern", "'../up'"]),
    ("a missing name", ["name=null"], ["name", "string", "None"]),
    ("a list where a mapping belongs", ["rounds=[1, 2]"], ["rounds", "Rounds"]),
]


@pytest.mark.parametrize(("overrides", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_bad_values_are_refused_by_name(small: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(small, overrides=overrides)
    message = str(caught.value)
    assert message.startswith(f"{small}: ")
    for word in words:
        assert word in message
    assert "Traceback" not in message and "pydantic.dev" not in message


def test_every_fault_is_told_at_once(small: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(small, overrides=["seed=-1", "rounds.count=0", "rounds.cuont=3"])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: [", ["not YAML", "line 1"]),
        ("- a\n- b", ["expected a mapping", "list"]),
        ("", ["expected a mapping", "NoneType"]),
        ("just words", ["expected a mapping", "str"]),
        ("name: !!python/object/apply:os.getcwd []", ["not YAML", "python/object"]),
        ("name: x\nstore: ${RATCHET_TEST_UNSET}", ["RATCHET_TEST_UNSET", "not set", "no default"]),
        ("extends: missing.yaml", ["missing.yaml", "no such configuration file"]),
        ("extends: file.yaml", ["extends itself"]),
        ("name: x\nalgorithm: {name: grpo}", ["data", "Field required"]),
    ],
    ids=["broken", "list", "empty", "text", "tag", "unset variable", "missing base", "itself", "no data"],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path / "file.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    for word in words:
        assert word in str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such configuration file"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", ["'seed'", "key=value"]),
        ("=5", ["'=5'", "key=value"]),
        ("seed=[", ["'seed=['", "not YAML"]),
        ("rewards.7.weight=1", ["rewards.7.weight", "'7'", "index below 1"]),
        ("rewards.first.weight=1", ["rewards.first.weight", "'first'", "index below 1"]),
        ("rewards.3={}", ["rewards.3", "'3'", "index below 1"]),
    ],
)
def test_bad_overrides_are_refused(small: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(small, overrides=[override])
    for word in words:
        assert word in str(caught.value)
