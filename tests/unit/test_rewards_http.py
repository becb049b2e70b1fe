"""The reward server's client in detail: what is sent, what is refused, how long it waits, and what it never says."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.rewards import HttpSource
from stages.artifacts.errors import InputError, SourceUnavailable
from stages.artifacts.store import new_attempt
from stages.program import Context
from stages.rewards import http
from stages.rewards.http import http_rewards
from stages.score_rollouts.run import run
from tests.fault.faulty_server import FaultyServer, true_reward
from tests.fault.test_reward_server import job

ROWS = [
    {"prompt_id": f"p{i}", "sample_index": 0, "prompt": "é\ud800", "completion": "c", "answer": "a"}
    | {"prompt_ids": [1, 2], "completion_ids": [3]}
    for i in range(4)
]


class Nothing:
    """Keeps no answers."""

    def find(self, ids: Sequence[str]) -> None:
        return None

    def keep(self, rewards: dict[str, float]) -> None:
        return None


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(http, "LONGEST_PAUSE_SECONDS", 0.05)


def ask(url: str, *, seen: list[Any] | None = None, **fields: Any) -> list[float]:
    source = HttpSource(url=url, **{"name": "server", "budget_seconds": 0.15, **fields})
    progress = (lambda *what: None) if seen is None else (lambda *what: seen.append(what))
    return http_rewards(source, ROWS, kept=Nothing(), on_progress=progress)


# What is sent


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with FaultyServer() as server:
        found = ask(server.url, batch_size=3, token_env="REWARD_TOKEN", clip=0.5)
        assert found == [max(-0.5, min(0.5, true_reward(f"p{i}/0"))) for i in range(4)]
        ask(server.url, send_token_ids=True)
    assert [len(document["rollouts"]) for document in server.documents] == [3, 1, 4]
    texts = {"prompt": "é\ud800", "completion": "c", "answer": "a"}
    assert server.documents[1]["rollouts"] == [{"id": "p3/0", **texts}]
    assert server.documents[2]["rollouts"][0] == {"id": "p0/0", **texts, "prompt_ids": [1, 2], "completion_ids": [3]}
    assert [headers.get("Authorization") for headers in server.headers] == ["Bearer s3cret"] * 2 + [None]
    assert server.headers[0]["Accept-Encoding"] == "identity"


# What comes back


def test_an_answer_without_end_is_not_read() -> None:
    with FaultyServer() as server:
        server.change = lambda number, _: (200, {"Content-Length": str(1 << 30)}, b" " * (2 << 20))
        with pytest.raises(SourceUnavailable, match="its answer is longer than 1052672 bytes"):
            ask(server.url)
        server.change = lambda number, _: (200, {"Content-Encoding": "gzip"}, b"x")
        with pytest.raises(SourceUnavailable, match="its answer is compressed, which was not asked for"):
            ask(server.url)


# Whether and when it is asked again


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_what_may_pass_is_asked_again(status: int) -> None:
    with FaultyServer() as server:
        server.change = lambda number, _: (status, {}, b"") if number < 2 else None
        assert ask(server.url, budget_seconds=20.0) == [true_reward(f"p{i}/0") for i in range(4)]
        assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422])
def test_what_will_not_pass_is_asked_once(status: int) -> None:
    with FaultyServer() as server:
        server.change = lambda number, _: (status, {}, b"")
        message = f"'server': expected rewards from {server.url}, found status {status}.* correct url, token_env"
        with pytest.raises(InputError, match=message):
            ask(server.url)
        assert len(server.requests) == 1


def test_a_redirect_is_refused_not_followed() -> None:
    with FaultyServer() as other, FaultyServer() as server:
        for status in (301, 302, 307, 308):
            server.change = lambda number, _, status=status: (status, {"Location": other.url}, b"")  # type: ignore[misc]
            with pytest.raises(InputError, match=f"found status {status}.* give the address that it leads to"):
                ask(server.url)
        assert other.requests == []


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_waited_for(form: str) -> None:
    def busy_once(number: int, _: Any) -> tuple[int, dict[str, str], bytes] | None:
        later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return (429, {"Retry-After": "1" if form == "seconds" else later}, b"") if number == 0 else None

    with FaultyServer() as server:
        server.change = busy_once
        ask(server.url, budget_seconds=20.0)
        first, second = server.times
    assert second - first >= 0.9


def test_a_retry_after_beyond_the_budget_costs_no_more_than_the_budget() -> None:
    with FaultyServer() as server:
        server.change = lambda number, _: (503, {"Retry-After": "86400"}, b"")
        started = time.monotonic()
        with pytest.raises(SourceUnavailable, match=r"found 2 failed requests in .* the last one: status 503"):
            ask(server.url, budget_seconds=0.5)
        assert time.monotonic() - started < 5.0


def test_pauses_double_up_to_a_limit_and_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pauses = [http._pause(failures, at="a/0") for failures in range(1, 2000)]
    assert pauses == [http._pause(failures, at="a/0") for failures in range(1, 2000)]
    for failures, pause in enumerate(pauses, start=1):
        longest = min(30.0, 0.5 * 2.0 ** (failures - 1)) if failures < 50 else 30.0
        assert longest / 2 <= pause <= longest
    assert len({http._pause(1, at=f"{i}/0") for i in range(50)}) == 50


def test_a_slow_drip_ends_with_the_timeout_of_the_whole_request() -> None:
    with FaultyServer("slow drip", share=1.0) as server:
        started = time.monotonic()
        with pytest.raises(SourceUnavailable, match=r"the last one: no whole answer within 0\.3 s"):
            ask(server.url, timeout_seconds=0.3, budget_seconds=0.2)
        assert time.monotonic() - started < 5.0


def test_the_budget_starts_anew_with_each_answer() -> None:
    with FaultyServer() as server:
        slow = [0.0]

        def sometimes(number: int, _: Any) -> tuple[int, dict[str, str], bytes] | None:
            if number % 2:
                return None
            time.sleep(0.35)
            slow[0] += 0.35
            return (503, {}, b"")

        server.change = sometimes
        ask(server.url, batch_size=1, budget_seconds=1.0)
        assert slow[0] > 1.0, "longer in all than the budget"


def test_waiting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BEAT_SECONDS", 0.02)
    seen: list[tuple[str, int, int]] = []
    with FaultyServer("timeout", share=1.0) as server, pytest.raises(SourceUnavailable):
        ask(server.url, seen=seen, timeout_seconds=0.3, budget_seconds=0.5)
    assert len(seen) >= 10
    assert ("scoring by server, waiting for the server (no whole answer within 0.3 s)", 0, 4) in seen


# What is never said: canaries in body, URL, header, reason and token

SAYINGS: list[bytes] = [
    b"HTTP/1.1 503 c4n4ry-reason\r\nX-A: c4n4ry-header\r\nContent-Length: 11\r\n\r\nc4n4ry-body",
    b"HTTP/1.1 401 c4n4ry-reason\r\nWWW-Authenticate: c4n4ry-header\r\nContent-Length: 11\r\n\r\nc4n4ry-body",
    b"HTTP/1.1 302 Found\r\nLocation: http://c4n4ry-url:c4n4ry-header@127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nRetry-After: c4n4ry-header\r\n\r\nc4n4ry-body",
    b'HTTP/1.1 200 OK\r\nContent-Length: 56\r\n\r\n{"rewards": [{"id": "c4n4ry-body", "reward": "c4n4ry"}]}',
    b"c4n4ry-body is no HTTP\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nc4n4ry-header no colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: c4n4ry-header\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: c4n4ry-header\r\nContent-Length: 1\r\n\r\nx",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nc4n4ry-body\r\n",
    b"HTTP/1.1 429 Busy\r\nRetry-After: c4n4ry-header\r\nContent-Length: 0\r\n\r\n",
]


def test_nothing_of_what_a_server_says_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, caplog: Any
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "c4n4ry-token")
    caplog.set_level("DEBUG")
    said: list[str] = []
    for number, saying in enumerate(SAYINGS):
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_say, args=(listener, saying), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/score"
        store, budget = tmp_path / str(number), {"budget_seconds": 0.1, "timeout_seconds": 1.0}
        scoring = job(store, url, token_env="REWARD_TOKEN", **budget)
        seen: list[Any] = []
        with pytest.raises((SourceUnavailable, InputError)) as caught:
            run(scoring, Context(out=new_attempt(scoring), report=lambda *what, seen=seen: seen.append(what)))
        listener.close()
        assert caught.value.__cause__ is None
        said += [str(caught.value), repr(seen), json.dumps(scoring.document())]
    said += [caplog.text, *capfd.readouterr()]
    said += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    hits = [text for text in said if "c4n4ry" in text]
    with capfd.disabled():
        print(
            f"S05: {len(SAYINGS)} hostile answers, canaries in 5 places, {len(said)} texts and files: {len(hits)} hits"
        )
    assert not hits


def _say(listener: socket.socket, saying: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(1 << 16)
            connection.sendall(saying)


def test_troubles_of_the_way_have_words_of_their_own() -> None:
    certificate = ssl.SSLCertVerificationError(1, "text")
    certificate.verify_message = "self-signed certificate"
    outer = httpx.ConnectError("c4n4ry")
    outer.__cause__ = certificate
    assert http._spell(outer) == "its certificate is not accepted: self-signed certificate"
    outer.__cause__ = ssl.SSLError("c4n4ry")
    assert http._spell(outer) == "the TLS connection failed"
    assert http._spell(httpx.ConnectError("c4n4ry")).startswith("no connection (is the host's name right")
    assert "c4n4ry" not in http._spell(httpx.RemoteProtocolError("c4n4ry"))
    with pytest.raises(SourceUnavailable, match=r"no connection .is the host's name right|ConnectError: "):
        ask("http://no-such-host.invalid/score")
