"""What is refused of a reward server without asking one: its configuration, its token, and answers by themselves."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from pydantic import ValidationError

from configs.load import explain
from configs.rewards import HttpSource
from stages.artifacts.errors import InputError
from stages.rewards.answers import NoAnswer, read_answer, retry_after
from stages.rewards.http import check_http_source
from stages.rewards.options import validate_options

# Configuration


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("url", "ftp://host/x", "expected a URL such as http://127.0.0.1:8000/score, found something else"),
        ("url", "host:80/score", "expected a URL such as"),
        ("url", "http:///score", "expected a URL such as"),
        ("url", "http://host:port/", "expected a URL such as"),
        ("url", "http://host:99999/", "expected a URL such as"),
        ("url", "http://ho st/", "expected a URL such as"),
        ("url", "http://host/\nx", "expected a URL such as"),
        ("url", "http://me:c4n4ry@host/", "without user name or password, found one with; .* into token_env"),
        ("url", "http://c4n4ry@host/", "without user name or password"),
        ("url", "http://host/?key=c4n4ry", "expected a URL without \\? and #.* into token_env"),
        ("url", "http://host/#c4n4ry", "expected a URL without \\? and #"),
        ("token_env", "sk-c4n4ry", "expected the name of an environment variable in capitals, such as REWARD_TOKEN"),
        ("token_env", "hf_c4n4ry", "never put the token itself here"),
        ("batch_size", 0, "greater than or equal to 1"),
        ("timeout_seconds", 0, "greater than 0"),
        ("budget_seconds", -1, "greater than 0"),
        ("clip", 0, "greater than 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_and_no_secret_repeated(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        HttpSource.model_validate({"url": "http://host/score", field: value})
    (line,) = explain(caught.value)
    assert line.startswith(f"{field}: ") and re.search(message, line) and "c4n4ry" not in line


@pytest.mark.parametrize(
    ("url", "name"),
    [("http://scorer:8000/score", "scorer"), ("http://127.0.0.1/x", "http"), ("https://rm.example.org/x", "http")],
)
def test_a_source_is_named_after_a_plain_host(url: str, name: str) -> None:
    assert HttpSource(url=url).name == name
    assert HttpSource(url=url, name="mine").name == "mine"


def test_the_token_must_be_there_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    source = HttpSource(url="http://host/score", token_env="REWARD_TOKEN")
    for check in (check_http_source, validate_options):
        monkeypatch.delenv("REWARD_TOKEN", raising=False)
        with pytest.raises(
            InputError, match=r"'host': token_env: expected a token .* variable REWARD_TOKEN, found none"
        ):
            check(source)
        monkeypatch.setenv("REWARD_TOKEN", "c4n4ry\n")
        with pytest.raises(InputError, match=r"printable ASCII without spaces in REWARD_TOKEN.*line end") as caught:
            check(source)
        assert "c4n4ry" not in str(caught.value)
        monkeypatch.setenv("REWARD_TOKEN", "c4n4ry")
        check(source)
    with pytest.raises(InputError, match="expected a name other than"):
        validate_options(HttpSource(url="http://host/score", name="total"))


# What comes back


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not of the form"),
        ('{"rewards": {}}', "not of the form"),
        ('{"rewards": []}', "expected 2 rewards in its answer, found 0"),
        ('{"rewards": [{"id": "a", "reward": 1}, {"id": "a", "reward": 1}]}', "or two for one id"),
        ('{"rewards": [{"id": "a", "reward": 1}, {"id": "c4n4ry", "reward": 1}]}', "not asked for"),
        ('{"rewards": [{"id": "a", "reward": 1}, {"id": 3, "reward": 1}]}', "not asked for"),
        ('{"rewards": [{"id": "a", "reward": 1}, 3]}', "not asked for"),
        ('{"rewards": [{"id": "a", "reward": 1}, {"id": "b"}]}', "expected a finite number as reward of b"),
        *(
            (f'{{"rewards": [{{"id": "a", "reward": 1}}, {{"id": "b", "reward": {value}}}]}}', message)
            for value, message in [
                ("NaN", "not JSON of finite numbers"),
                ("-Infinity", "not JSON of finite numbers"),
                ('1, "reward": 2', "each key once"),
                ("1e999", "finite number as reward of b"),
                ("3.41e38", "finite number as reward of b"),
                ("1" + "0" * 400, "finite number as reward of b"),
                ("1" * 5000, "not JSON"),
                ("null", "finite number as reward of b"),
                ("true", "finite number as reward of b"),
                ('"1.0"', "finite number as reward of b"),
                ("[1.0]", "finite number as reward of b"),
            ]
        ),
    ],
)
def test_an_answer_that_is_not_one_finite_reward_per_id_is_none(body: str, message: str) -> None:
    with pytest.raises(NoAnswer, match=message) as caught:
        read_answer(body.encode(), ids={"a", "b"})
    assert "c4n4ry" not in str(caught.value)


def test_rewards_are_matched_by_id_and_other_keys_ignored() -> None:
    body = b'{"model": "x", "rewards": [{"id": "b", "reward": 2, "why": "good"}, {"id": "a", "reward": -1.5}]}'
    assert read_answer(body, ids={"a", "b"}) == {"a": -1.5, "b": 2.0}


def test_retry_after_in_both_forms() -> None:
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    assert retry_after("7", now=now) == 7.0
    assert retry_after(format_datetime(now + timedelta(seconds=90), usegmt=True), now=now) == 90.0
    assert retry_after("Sat, 21 Nov 2026 12:00:05 -0000", now=now) == 5.0
    past = format_datetime(now - timedelta(days=1), usegmt=True)
    for nothing in (None, "", "soon", "-3", "1.5", "nan", "inf", "9" * 30, past, "Sat, 99 Nov 2026 12:00:00 GMT"):
        assert retry_after(nothing, now=now) == 0.0
