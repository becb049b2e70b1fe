"""Secrets: what is refused in a configuration, and what is taken out of every text that is kept."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import ConfigError, load_config
from configs.rewards import FunctionSource
from configs.secrets import is_secret_name, redact
from stages.artifacts.durable import write_json
from stages.artifacts.errors import InputError
from stages.program import serve
from stages.score_rollouts.job import Inputs, Parameters, ScoreRollouts
from tasks.display import ExpectedErrors
from tests.security.audited import SECRET_NAMES, SECRETS
from tests.unit.stage_artifacts import commit_rollouts, rollout

CONFIG = "tests/integration/tiny_grpo.yaml"
SECRET = "canary5e1f00d5e1f00d"
REFUSED = {
    "a variable named like a secret": ("tracking.project", "${WANDB_API_KEY}", "token_env to WANDB_API_KEY"),
    "with a default": ("tracking.project", "x-${HF_TOKEN:-none}", "token_env to HF_TOKEN"),
    "inside a text": ("data.prompts", {"kind": "files", "path": "s3://${STORE_SECRET}@host/x"}, "data.prompts.path"),
    "a password in a URL": ("data.prompts", {"kind": "files", "path": "https://me:password@host/x"}, "a URL"),
    "a URL from a variable": ("store", "${DATA_URL}", "store: expected no secret"),
    "the secret itself": ("tracking.project", f"p-{SECRET}", "environment variable JUDGE_TOKEN"),
    "in a list": ("data.prompts", {"kind": "files", "path": "x", "columns": {"prompt": SECRET}}, "columns.prompt"),
    "for a server, unrecognised in a log": (
        "rewards",
        [{"kind": "http", "url": "http://127.0.0.1:9/score", "token_env": "JUDGE"}],
        "token_env: expected a name that says that it is a secret, such as REWARD_TOKEN, found JUDGE",
    ),
    "in a wrong place": ("rounds.count", SECRET, "rounds.count"),
}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "STORE_SECRET"):
        monkeypatch.setenv(name, f"{SECRET}-{name}")
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    monkeypatch.setenv("DATA_URL", "https://me:password@host/x")


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_s05_a_secret_in_a_configuration_is_refused_and_not_repeated(case: str, secrets: None) -> None:
    key, value, said = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG, overrides={key: value})
    assert said in str(refused.value)
    assert SECRET not in str(refused.value) and "me:password" not in str(refused.value)


def test_s05_a_variable_that_is_no_secret_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "elsewhere")
    assert load_config(CONFIG, overrides={"store": "${WHERE}/x"}).store == "elsewhere/x"


def test_s05_names_tell_secrets_from_settings() -> None:
    ordinary = "PWD OLDPWD PATH TOKENIZERS_PARALLELISM MAX_TOKENS RATCHET_KEY_FILE SSH_AUTH_SOCK KEYBOARD HOME MONKEY"
    assert [name for name in ordinary.split() if is_secret_name(name)] == []
    assert [name for name in SECRET_NAMES if not is_secret_name(name)] == ["REMOTE_STORE_URL"]


def test_s05_twenty_secrets_are_taken_out_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://user:{SECRETS['REMOTE_STORE_URL']}@store.example/bucket"
    for name, value in (SECRETS | {"REMOTE_STORE_URL": url}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DEPLOY_KEY", "-----BEGIN KEY-----\nfirstlineofthekey\nsecondlineofthekey\n")
    text = " ".join([*SECRETS.values()][:-1]) + f" {url} firstlineofthekey and secondlineofthekey"
    kept = redact(text)
    assert not [name for name, value in SECRETS.items() if value in kept] and "lineofthekey" not in kept
    assert "[JUDGE_TOKEN]" in kept and "s3://[password]@store.example/bucket" in kept and "[DEPLOY_KEY] and" in kept
    assert redact("nothing here: http://host:80/x@y") == "nothing here: http://host:80/x@y"


def test_s05_a_rule_that_fails_with_a_secret_tells_the_flow_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    job = ScoreRollouts(
        store=tmp_path,
        seed=1,
        inputs=Inputs(rollouts=commit_rollouts(tmp_path, [rollout("p", 0)])),
        parameters=Parameters(
            sources=(FunctionSource(function="tests.security.leaky:failing"),),
            code={},
            dtype="float32",
            max_tokens_per_microbatch=16,
        ),
    )
    write_json(tmp_path / "job.json", job.document())
    order = f'{{"job": "{tmp_path / "job.json"}", "out": "{tmp_path / "out"}"}}\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(order))
    replies = io.StringIO()
    serve(replies, warm="")
    assert "403 for Bearer [OPENAI_API_KEY]" in replies.getvalue() and SECRET not in replies.getvalue()


def test_s05_what_prefect_logs_of_an_error_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    for error in (InputError(f"bad {SECRET}"), KeyError(SECRET)):
        try:
            raise error
        except (InputError, KeyError):
            info = sys.exc_info()
        record = logging.LogRecord("prefect", logging.ERROR, "x.py", 1, "failed with %s", (SECRET,), info)
        assert ExpectedErrors().filter(record)
        text = logging.Formatter().format(record)
        assert SECRET not in text and "failed with [JUDGE_TOKEN]" in text
        assert ("Traceback" in text) == isinstance(error, KeyError)


def test_s05_a_workers_log_has_no_secret_even_printed_in_pieces_or_in_a_last_traceback() -> None:
    code = (
        "import os, sys\n"
        "from configs.secrets import RedactedStream\n"
        "sys.stdout, sys.stderr = RedactedStream(1), RedactedStream(2)\n"
        "key = os.environ['JUDGE_TOKEN']\n"
        "print(key[:5], key[5:], sep='')\n"
        "print('no end', end='')\n"
        "raise RuntimeError(key)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JUDGE_TOKEN": SECRET},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and SECRET not in done.stdout + done.stderr
    assert done.stdout == "[JUDGE_TOKEN]\nno end"
    assert done.stderr.splitlines()[-1] == "RuntimeError: [JUDGE_TOKEN]"


def test_s05_a_password_in_the_servers_address_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.server import PREFECT_API_URL, prefect_server, temporary_settings

    with (
        temporary_settings({PREFECT_API_URL: f"http://me:{SECRET}@127.0.0.1:9/api"}),
        pytest.raises(InputError, match=r"http://\[password\]@127\.0\.0\.1:9/api") as refused,
        prefect_server(log=Path("unused")),
    ):
        pass
    assert SECRET not in str(refused.value)
