"""The reference server with a tiny reward model: the bits of the source `reward_model`, and the page about it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from configs.load import load_config
from configs.rewards import HttpSource, RewardModelSource
from stages import reward_server
from stages.artifacts.durable import write_json
from stages.artifacts.errors import InputError
from stages.artifacts.schemas import REWARDS
from stages.artifacts.shards import read_rows
from stages.prepare_datasets.tokenizer import train_tokenizer
from stages.reward_server import open_server
from stages.score_rollouts.job import Inputs, Parameters, ScoreRollouts
from stages.score_rollouts.run import run
from tests.integration.pipelines import ROOT
from tests.unit.stage_artifacts import commit_files, commit_rollouts, rollout, run_stage

PAGE = (ROOT / "docs" / "reward_server.md").read_text(encoding="utf-8")
ROWS = [
    rollout(f"prompt{i % 4}", i // 4, tokens=1 + i % 5, prompt_ids=[0, 3 + i], completion=str(i)) for i in range(12)
]
TEXTS = ["Sort the digits 312.", "Sort the digits 4057."]


@dataclass(frozen=True)
class Served:
    """A reward model in a store, and the server that has it."""

    store: Path
    model: Any
    directory: Path
    url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("served")

    def write(out: Path) -> None:
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_labels=1,
            pad_token_id=2,
        )
        LlamaForSequenceClassification(config).save_pretrained(out / "reward_model")
        train_tokenizer(TEXTS, vocabulary=300, max_tokens=64).save_pretrained(out / "reward_model")
        write_json(out / "reward_model.json", {"score_mean": 0.0, "score_std": 1.0})

    model = commit_files(store, "train_reward_model", write, content="served")
    directory = model.path(store) / "reward_model"
    with (store / "server.log").open("w") as log:
        command = [sys.executable, "-m", "stages.reward_server", "--model", str(directory), "--port", "0"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"reward server: (http://127\.0\.0\.1:\d+/score)\n", line)
            assert found, line + (store / "server.log").read_text()
            yield Served(store=store, model=model, directory=directory, url=found[1])
        finally:
            process.terminate()
            process.wait(timeout=10)


def rewards(served: Served, source: HttpSource | RewardModelSource, *, seed: int) -> list[dict[str, Any]]:
    scoring = ScoreRollouts(
        store=served.store,
        seed=seed,
        inputs=Inputs(rollouts=commit_rollouts(served.store, ROWS), reward_model=served.model),
        parameters=Parameters(sources=(source,), code={}, dtype="float32", max_tokens_per_microbatch=1),
    )
    return read_rows(run_stage(run, scoring)[0], "rewards", REWARDS)


def test_the_server_gives_the_bits_of_the_model_in_the_process(served: Served) -> None:
    inside = rewards(served, RewardModelSource(name="rm", normalize=False), seed=0)
    assert len({row["reward"] for row in inside}) == len(ROWS)
    sizes = (1, 5, len(ROWS))
    for size in sizes:
        source = HttpSource(url=served.url, name="rm", batch_size=size, send_token_ids=True)
        assert rewards(served, source, seed=size) == inside, size
    print(f"R13: the reference server gave the bits of the model in the process, batches of {sizes}: 3 of 3")


def test_from_texts_it_makes_the_tokens_itself(served: Served) -> None:
    texts = {"id": "a/0", "prompt": "Sort the digits 312.", "completion": "123"}
    tokenizer = train_tokenizer(TEXTS, vocabulary=300, max_tokens=64)
    completion = tokenizer("123", add_special_tokens=False)["input_ids"]
    ids = {"prompt_ids": tokenizer(texts["prompt"])["input_ids"], "completion_ids": [*completion, 1]}
    answers = [httpx.post(served.url, json={"rollouts": [rollout]}).json() for rollout in (texts, {"id": "a/0"} | ids)]
    assert answers[0] == answers[1] and set(answers[0]["rewards"][0]) == {"id", "reward"}
    assert httpx.post(served.url, json={"rollouts": []}).json() == {"rewards": []}


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ({"rollouts": [{"id": "a/0"}]}, 400, "expected prompt and completion, or prompt_ids and completion_ids"),
        ({"rollouts": [{"id": "a/0", "prompt_ids": [1], "completion_ids": [300]}]}, 400, "token ids from 0 to 299"),
        ({"rollouts": [{"id": "a/0", "prompt_ids": 3, "completion_ids": None}]}, 400, "token ids from 0 to 299"),
        ({"rollouts": [{"prompt": ""}]}, 400, 'expected {"rollouts"'),
        ({"rollouts": "abc"}, 400, 'expected {"rollouts"'),
        ([], 400, 'expected {"rollouts"'),
    ],
)
def test_a_bad_request_is_refused_in_words(served: Served, content: Any, status: int, message: str) -> None:
    answer = httpx.post(served.url, json=content)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_example_of_the_page(served: Served) -> None:
    (example,) = (block for block in re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.S | re.M) if block.startswith("curl "))
    command = [part.replace("http://127.0.0.1:8000/score", served.url) for part in shlex.split(example)]
    assert served.url in command
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (reward,) = json.loads(done.stdout)["rewards"]
    assert reward["id"] == "a/0" and isinstance(reward["reward"], float)


def test_the_configuration_of_the_page_loads(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    base = ROOT / "configs" / "quickstart_grpo.yaml"
    (tmp_path / "run.yaml").write_text(f"extends: {base}\n{block}")
    (source,) = load_config(tmp_path / "run.yaml").rewards
    assert isinstance(source, HttpSource)
    # All but the clip and the token are what they are without being said.
    said = source.model_dump(include={"batch_size", "timeout_seconds", "budget_seconds", "send_token_ids", "weight"})
    assert said.items() <= HttpSource(url=source.url).model_dump().items()


def test_without_the_token_nothing_is_scored() -> None:
    asked = []

    def score(rollouts: Sequence[Any]) -> list[float]:
        asked.append(rollouts)
        return [float("nan") if rollout["id"] == "nan" else 1.5 for rollout in rollouts]

    with open_server(score, host="127.0.0.1", port=0, token="t0ken") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        body, right = {"rollouts": [{"id": "a"}]}, {"Authorization": "Bearer t0ken"}
        for wrong in ({}, {"Authorization": "Bearer t0ke"}, {"Authorization": "t0ken"}):
            assert httpx.post(f"{address}/score", json=body, headers=wrong).status_code == 401
        assert httpx.post(f"{address}/other", json=body, headers=right).status_code == 404
        form = right | {"Content-Type": "text/plain"}
        assert httpx.post(f"{address}/score", content=json.dumps(body), headers=form).status_code == 415
        assert httpx.post(f"{address}/score", content=iter([b"{}"]), headers=right).status_code == 415
        json_type = right | {"Content-Type": "application/json"}
        assert httpx.post(f"{address}/score", content=iter([b"{}"]), headers=json_type).status_code == 411
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reward_server, "LARGEST_REQUEST_BYTES", 10)
            assert httpx.post(f"{address}/score", json=body, headers=right).status_code == 413
        assert asked == []
        answer = httpx.post(f"{address}/score", json=body, headers=right)
        assert answer.json() == {"rewards": [{"id": "a", "reward": 1.5}]}
        assert httpx.post(f"{address}/score", json={"rollouts": [{"id": "nan"}]}, headers=right).status_code == 500
        with pytest.raises(InputError, match=r"--host 127\.0\.0\.1 --port \d+: expected to listen there, found: "):
            open_server(score, host="127.0.0.1", port=server.server_address[1], token=None)
        server.shutdown()


def test_what_it_cannot_serve_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SOME_TOKEN", "t0ken")
    os.environ.pop("NO_TOKEN", None)
    cases = {
        ("--host", "0.0.0.0"): "--host 0.0.0.0: expected a loopback address such as 127.0.0.1, because without a token",
        ("--host", "example.org"): "expected a loopback address",
        ("--host", "0.0.0.0", "--token-env", "NO_TOKEN"): "--token-env NO_TOKEN: expected a token in that variable",
        ("--host", "0.0.0.0", "--token-env", "SOME_TOKEN"): "found no config.json in it",
        ("--host", "localhost"): "found no config.json in it",
    }
    for arguments, message in cases.items():
        assert reward_server.main(["--model", str(tmp_path), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and "t0ken" not in error
