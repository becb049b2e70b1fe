"""`python -m stages.reward_server`: one of our reward models behind HTTP, as an example and for tests.

Speaks what docs/reward_server.md describes. Knows no store and no run.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from stages.artifacts.errors import InputError, RatchetError
from stages.engines.devices import open_device
from stages.job import Compute
from stages.models.scalar import load_scalar_model, score_sequences
from stages.prepare_datasets.encoding import Encoder

PATH = "/score"
LARGEST_REQUEST_BYTES = 64 << 20

Rollout = Mapping[str, Any]
Score = Callable[[Sequence[Rollout]], list[float]]


class ModelScorer:
    """A reward model that scores whole rollouts, one call at a time.

    max_tokens_per_microbatch: 1 scores each rollout alone, so that its reward cannot depend on its neighbours.
    """

    def __init__(self, directory: Path, *, dtype: str, compute: Compute, max_tokens_per_microbatch: int) -> None:
        device = open_device(compute)
        self._model = load_scalar_model(directory, dtype=dtype).to(device)
        self._directory = directory
        self._limit = max_tokens_per_microbatch
        self._encoder: tuple[Any, Encoder] | None = None
        self._turn = threading.Lock()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The reward of each rollout. Raises InputError where one cannot be read."""
        with self._turn:
            rows = [self._row(rollout) for rollout in rollouts]
            if not rows:
                return []
            scores: list[float] = score_sequences(self._model, rows, max_tokens_per_microbatch=self._limit).tolist()
            return scores

    def _row(self, rollout: Rollout) -> tuple[list[int], list[int]]:
        """Token ids of prompt and completion as sampled, if sent; else of the texts, the completion taken as ended."""
        if "prompt_ids" in rollout and "completion_ids" in rollout:
            parts = [p if isinstance(p, list) else [] for p in (rollout["prompt_ids"], rollout["completion_ids"])]
            vocabulary, ids = self._model.config.vocab_size, [token for part in parts for token in part]
            if not ids or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
                raise InputError(f"rollout {rollout['id']!r}: expected token ids from 0 to {vocabulary - 1}")
            return parts[0], parts[1]
        if not (isinstance(rollout.get("prompt"), str) and isinstance(rollout.get("completion"), str)):
            raise InputError(
                f"rollout {rollout['id']!r}: expected prompt and completion, or prompt_ids and completion_ids"
            )
        if self._encoder is None:
            tokenizer = AutoTokenizer.from_pretrained(self._directory, trust_remote_code=False)
            self._encoder = (tokenizer, Encoder(tokenizer, chat="never"))
        tokenizer, encoder = self._encoder
        return tokenizer(rollout["prompt"])["input_ids"], encoder.encode_completion(rollout["completion"])


def open_server(score: Score, *, host: str, port: int, token: str | None) -> ThreadingHTTPServer:
    """A server that listens but does not serve yet. Raises InputError if it cannot."""
    try:
        return ThreadingHTTPServer((host, port), _handler(score, token=token))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: expected to listen there, found: {reason}") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _handler(score: Score, *, token: str | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """One connection."""

        protocol_version = "HTTP/1.1"
        timeout = 60.0

        def do_POST(self) -> None:
            """Score the rollouts of one request."""
            status, answer = self._answer()
            body = json.dumps(answer, allow_nan=False).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status >= 400:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[int, dict[str, Any]]:
            given = self.headers.get("Authorization", "")
            if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return 401, {"error": "expected Authorization: Bearer and the server's token"}
            if self.path != PATH:
                return 404, {"error": f"expected a request for {PATH}"}
            # No form of a web page can send this type unasked.
            if self.headers.get_content_type() != "application/json":
                return 415, {"error": "expected Content-Type: application/json"}
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                return 411, {"error": "expected a Content-Length"}
            if int(length) > LARGEST_REQUEST_BYTES:
                return 413, {"error": f"expected at most {LARGEST_REQUEST_BYTES} bytes; ask for fewer rollouts at once"}
            return self._rewards(self.rfile.read(int(length)))

        def _rewards(self, body: bytes) -> tuple[int, dict[str, Any]]:
            try:
                rollouts = json.loads(body)["rollouts"]
                ids = [rollout["id"] for rollout in rollouts]
            except (ValueError, KeyError, TypeError, RecursionError):
                return 400, {"error": 'expected {"rollouts": [{"id": ..., "prompt": ..., "completion": ...}]}'}
            try:
                rewards = score(rollouts)
            except InputError as error:
                return 400, {"error": str(error)}
            if not all(math.isfinite(reward) for reward in rewards):
                return 500, {"error": "the model gave a reward that is not finite"}
            return 200, {"rewards": [{"id": i, "reward": r} for i, r in zip(ids, rewards, strict=True)]}

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged."""

    return Handler


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a reward model until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m stages.reward_server", description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="reward_model/ of a train_reward_model artifact")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the token that clients must send"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--max-tokens-per-microbatch", type=int, default=1, help="1: each rollout alone (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    try:
        _serve(asked)
    except RatchetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _serve(asked: argparse.Namespace) -> None:
    token = os.environ.get(asked.token_env, "") if asked.token_env else None
    if token == "":
        raise InputError(f"--token-env {asked.token_env}: expected a token in that variable, found none")
    if token is None and not _is_loopback(asked.host):
        raise InputError(
            f"--host {asked.host}: expected a loopback address such as 127.0.0.1, because without a token anybody who "
            "reaches the server could use it; name the environment variable of a token in --token-env"
        )
    if not (asked.model / "config.json").is_file():
        raise InputError(
            f"--model {asked.model}: expected the reward_model/ of an artifact, found no config.json in it"
        )
    score = ModelScorer(
        asked.model,
        dtype=asked.dtype,
        compute=Compute(device=asked.device, threads=asked.threads),
        max_tokens_per_microbatch=asked.max_tokens_per_microbatch,
    )
    with open_server(score, host=asked.host, port=asked.port, token=token) as server:
        print(f"reward server: http://{asked.host}:{server.server_address[1]}{PATH}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
