"""prefect.yaml: the deployments exist, and what they pass is what the flow takes."""

from __future__ import annotations

import importlib
import inspect
import typing
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml

from configs.load import load_config
from tasks.run import run_name

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
DEPLOYMENTS: dict[str, dict[str, Any]] = {d["name"]: d for d in SETTINGS["deployments"]}
each = pytest.mark.parametrize("name", sorted(DEPLOYMENTS))


def test_the_promised_deployments() -> None:
    assert set(DEPLOYMENTS) == {"full-pipeline", "grpo", "reward-model"}


@each
def test_one_process_pool(name: str) -> None:
    assert DEPLOYMENTS[name]["work_pool"] == {"name": "ratchet"}
    assert DEPLOYMENTS[name]["tags"] and DEPLOYMENTS[name]["description"]


@each
def test_entrypoint_is_the_flow(name: str) -> None:
    path, _, function = DEPLOYMENTS[name]["entrypoint"].partition(":")
    assert (ROOT / path).is_file()
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert getattr(module, function).name == "rlhf"


@each
def test_parameters_fit_the_signature(name: str) -> None:
    from flows.rlhf import rlhf

    signature = inspect.signature(rlhf.fn)
    signature.bind(**DEPLOYMENTS[name]["parameters"])
    until = typing.get_type_hints(rlhf.fn)["until"]
    assert DEPLOYMENTS[name]["parameters"].get("until", "policy") in typing.get_args(until)
    rlhf.validate_parameters(DEPLOYMENTS[name]["parameters"])


def test_the_flow_takes_what_the_readme_says() -> None:
    from flows.rlhf import rlhf

    assert list(inspect.signature(rlhf.fn).parameters) == [
        "config",
        "overrides",
        "until",
        "rounds",
        "seed",
        "on_change",
        "take_over",
    ]


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"until": "tomorrow"}, "until"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": "many"}, "rounds"),
        ({"seed": -1}, "seed"),
        ({"overrides": ["a=1"]}, "overrides"),
        ({"on_change": "ignore"}, "on_change"),
        ({"confg": "x.yaml"}, "confg"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(parameters: dict[str, Any], word: str) -> None:
    from prefect.exceptions import ParameterTypeError, SignatureMismatchError

    from flows.rlhf import rlhf

    with pytest.raises((ParameterTypeError, SignatureMismatchError), match=word):
        rlhf.validate_parameters(parameters)


@each
def test_only_config_until_on_change_and_the_runs_name_are_given(name: str) -> None:
    parameters = DEPLOYMENTS[name]["parameters"]
    assert set(parameters) <= {"config", "until", "on_change", "overrides"}
    assert set(parameters.get("overrides", {})) <= {"name"}


def test_the_nightly_run_has_a_directory_and_a_lease_of_its_own() -> None:
    names = []
    for name in ("full-pipeline", "reward-model"):
        given = DEPLOYMENTS[name]["parameters"]
        names.append(run_name(load_config(ROOT / given["config"], overrides=given.get("overrides", {}))))
    assert names[0] != names[1]


def test_the_nightly_run_expects_its_data_to_grow() -> None:
    assert {n: d["parameters"].get("on_change") for n, d in DEPLOYMENTS.items()} == {
        **dict.fromkeys(DEPLOYMENTS),
        "reward-model": "rebuild",
    }


@each
def test_config_exists_and_fits(name: str) -> None:
    config = load_config(ROOT / DEPLOYMENTS[name]["parameters"]["config"])
    if name == "grpo":
        assert config.algorithm.name == "grpo"
    else:
        assert config.reward_model is not None


@each
def test_one_run_at_a_time(name: str) -> None:
    strategy = "CANCEL_NEW" if name == "reward-model" else "ENQUEUE"
    assert DEPLOYMENTS[name]["concurrency_limit"] == {"limit": 1, "collision_strategy": strategy}


def test_only_the_reward_model_is_scheduled_and_nightly() -> None:
    assert [name for name, deployment in DEPLOYMENTS.items() if deployment.get("schedules")] == ["reward-model"]
    (schedule,) = DEPLOYMENTS["reward-model"]["schedules"]
    assert schedule["cron"] == "0 3 * * *"
    assert ZoneInfo(schedule["timezone"])
    assert schedule["active"] is False


def test_prefect_reads_the_schedule() -> None:
    from prefect.client.schemas.schedules import CronSchedule

    (schedule,) = DEPLOYMENTS["reward-model"]["schedules"]
    assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
