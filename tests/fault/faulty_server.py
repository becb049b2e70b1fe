"""A reward server on loopback that fails as told, and remembers what it was asked. Speaks raw HTTP, so it can lie."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

FAULTS = (
    "500",
    "502",
    "503",
    "429 Retry-After",
    "timeout",
    "slow drip",
    "reset",
    "bad JSON",
    "NaN",
    "wrong count",
    "unknown id",
    "shuffled",
)
HARMLESS = "shuffled"


def true_reward(name: str) -> float:
    """What this server thinks of a rollout: a number that depends on its id alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 2**46 - 2.0


class FaultyServer(ThreadingHTTPServer):
    """Answers, or fails in the way `fault` says for `share` of the requests, drawn by `seed`.

    secrets: said in the reason, a header and the body of every answer that is no success.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, fault: str = "", *, share: float = 0.3, seed: int = 0, port: int = 0, secrets: tuple[str, ...] = ()
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.fault = fault
        self.share = share
        self.secrets = secrets
        self.requests: list[tuple[tuple[str, ...], bool]] = []
        self.documents: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.change: Callable[[int, dict[str, Any]], tuple[int, dict[str, str], bytes] | None] | None = None
        self.closing = threading.Event()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"

    @property
    def failures(self) -> int:
        return sum(failed for _, failed in self.requests)

    def __enter__(self) -> FaultyServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what many of the tests are about."""

    def note(self, document: dict[str, Any], headers: dict[str, str]) -> tuple[int, bool]:
        """Remember a request. Returns its number and whether it shall fail."""
        with self._lock:
            fails = bool(self.fault) and self._random.random() < self.share
            self.requests.append((tuple(item["id"] for item in document["rollouts"]), fails))
            self.documents.append(document)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            return len(self.requests) - 1, fails


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number, fails = self.server.note(document, dict(self.headers.items()))
        rewards = [{"id": item["id"], "reward": true_reward(item["id"])} for item in document["rollouts"]]
        changed = self.server.change(number, document) if self.server.change else None
        if changed is not None:
            self._send(*changed)
        elif fails:
            self._fail(self.server.fault, rewards)
        else:
            self._send(200, {}, _json(rewards))

    def _fail(self, fault: str, rewards: list[dict[str, Any]]) -> None:
        other = [dict(item) for item in rewards]
        match fault:
            case "429 Retry-After":
                self._send(429, {"Retry-After": "0"}, b"slow down")
            case "timeout":
                self.server.closing.wait(3.0)
            case "slow drip":
                self._drip(_json(rewards))
            case "reset":
                # A linger of zero makes close() a reset.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
            case "bad JSON":
                self._send(200, {}, _json(rewards)[:-3])
            case "NaN":
                other[-1]["reward"] = float("nan")
                self._send(200, {}, _json(other))
            case "wrong count":
                self._send(200, {}, _json(other[:-1]))
            case "unknown id":
                other[0]["id"] += "0"
                self._send(200, {}, _json(other))
            case "shuffled":
                self._send(200, {}, _json(other[::-1]))
            case status:
                self._send(int(status), {}, b"no")

    def _drip(self, body: bytes) -> None:
        """A byte at a time: no pause is long, the whole is."""
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        for byte in data:
            if self.server.closing.wait(0.05):
                return
            self.connection.sendall(bytes([byte]))

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        secrets = " ".join(self.server.secrets) if status >= 300 else ""
        self.send_response(status, f"Reason {secrets}" if secrets else None)
        if secrets:
            headers = headers | {"X-Echo": secrets, "Set-Cookie": f"s={secrets}"}
            body += secrets.encode()
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def _json(rewards: list[dict[str, Any]]) -> bytes:
    return json.dumps({"rewards": rewards}).encode()
