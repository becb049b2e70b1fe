"""Rewards from a server, asked until it answers or the budget is spent. Makes no reward up; loads no torch.

What the server sends is never quoted, in no message and no log: it may be a secret.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import httpx

from configs.rewards import HttpSource
from stages.artifacts.errors import InputError, SourceUnavailable
from stages.artifacts.seeds import seed_at
from stages.rewards.answers import NoAnswer, read_answer, retry_after

Row = Mapping[str, Any]
OnProgress = Callable[[str, int, int], None]

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
_BEAT_SECONDS = 2.0
_FREE_ANSWER_BYTES = 1 << 20
_ANSWER_BYTES_PER_ROLLOUT = 1 << 10
_WORTH_ANOTHER_TRY = frozenset({408, 425, 429})


class KeptAnswers(Protocol):
    """Where answered batches are kept until the artifact is whole, so that none is asked for twice."""

    def find(self, ids: Sequence[str]) -> dict[str, float] | None:
        """The rewards of a batch, if an earlier attempt got them."""

    def keep(self, rewards: dict[str, float]) -> None:
        """Make the rewards of a batch durable."""


def check_http_source(source: HttpSource) -> None:
    """Raise InputError unless the server could be asked: a sound URL, and a token where one is named. Asks nothing."""
    where = f"reward source {source.name!r}"
    try:
        httpx.URL(source.url)
    except httpx.InvalidURL:
        raise InputError(f"{where}: url: expected a URL such as http://127.0.0.1:8000/score") from None
    if source.token_env is None:
        return
    token = os.environ.get(source.token_env, "")
    if not token:
        raise InputError(
            f"{where}: token_env: expected a token in the environment variable {source.token_env}, found none; set it "
            "where the run is started"
        )
    if not re.fullmatch("[!-~]+", token):
        raise InputError(
            f"{where}: token_env: expected a token of printable ASCII without spaces in {source.token_env}, found "
            "another character in it; is there a line end?"
        )


def rollout_id(row: Row) -> str:
    """The name by which a server knows a rollout."""
    return f"{row['prompt_id']}/{row['sample_index']}"


def http_rewards(source: HttpSource, rows: Sequence[Row], *, kept: KeptAnswers, on_progress: OnProgress) -> list[float]:
    """The reward of each rollout row by the server, in the order of the rows, clipped as configured.

    Raises InputError where the server refuses to be asked like this, and SourceUnavailable once it brought no
    reward for budget_seconds. on_progress is called every few seconds, also while waiting.
    """
    check_http_source(source)
    with _quiet_libraries():
        found = asyncio.run(_Conversation(source, kept=kept, on_progress=on_progress, total=len(rows)).score(rows))
    rewards = [found[rollout_id(row)] for row in rows]
    if source.clip is None:
        return rewards
    return [max(-source.clip, min(source.clip, reward)) for reward in rewards]


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Below WARNING, httpx and httpcore log what the server says, and what is said to it."""
    loggers = [logging.getLogger(name) for name in ("httpx", "httpcore")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Conversation:
    """One scoring of all rollouts: batches in order, one request at a time."""

    def __init__(self, source: HttpSource, *, kept: KeptAnswers, on_progress: OnProgress, total: int) -> None:
        self.source = source
        self.kept = kept
        self.on_progress = on_progress
        self.total = total
        self.found: dict[str, float] = {}
        self.heard = time.monotonic()
        self.trouble = ""

    async def score(self, rows: Sequence[Row]) -> dict[str, float]:
        beat = asyncio.create_task(self._beat())
        try:
            # No proxy and no .netrc: the token goes to this server and nowhere else.
            async with httpx.AsyncClient(
                headers=self._headers(),
                verify=httpx.create_ssl_context(),
                timeout=None,  # noqa: S113 (one limit for the whole request stands around it)
                follow_redirects=False,
                trust_env=False,
            ) as client:
                size = self.source.batch_size
                for start in range(0, len(rows), size):
                    await self._score_batch(client, rows[start : start + size])
        finally:
            beat.cancel()
        return self.found

    def _headers(self) -> dict[str, str]:
        # Without compression, so that the limit on an answer's size is one on what it becomes, too.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "ratchet"}
        if self.source.token_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.source.token_env]}"
        return headers

    async def _beat(self) -> None:
        """Say every few seconds that all is well, whatever is being waited for."""
        while True:
            self._say()
            await asyncio.sleep(_BEAT_SECONDS)

    def _say(self) -> None:
        trouble = f", waiting for the server ({self.trouble})" if self.trouble else ""
        self.on_progress(f"scoring by {self.source.name}{trouble}", len(self.found), self.total)

    async def _score_batch(self, client: httpx.AsyncClient, batch: Sequence[Row]) -> None:
        ids = [rollout_id(row) for row in batch]
        rewards = self.kept.find(ids)
        if rewards is None:
            rewards = await self._until_answered(client, batch)
            self.kept.keep(rewards)
        self.found |= rewards
        self.trouble, self.heard = "", time.monotonic()
        self._say()

    async def _until_answered(self, client: httpx.AsyncClient, batch: Sequence[Row]) -> dict[str, float]:
        failures = 0
        while True:
            try:
                async with asyncio.timeout(self.source.timeout_seconds):
                    return await self._ask(client, batch)
            except TimeoutError:
                failure = NoAnswer(f"no whole answer within {self.source.timeout_seconds:g} s")
            except NoAnswer as error:
                failure = error
            failures += 1
            left = self.heard + self.source.budget_seconds - time.monotonic()
            if left <= 0:
                break
            self.trouble = str(failure)
            pause = max(_pause(failures, at=rollout_id(batch[0])), failure.retry_after_seconds)
            await asyncio.sleep(min(pause, left))  # whatever it asked for, it is asked once more at the end
        raise SourceUnavailable(
            f"reward source {self.source.name!r}: expected rewards from {self.source.url} within "
            f"{self.source.budget_seconds:g} s (budget_seconds), found {failures} failed requests in "
            f"{time.monotonic() - self.heard:.0f} s; the last one: {failure}. No reward was made up. The generations "
            f"are kept, and so are {len(self.found)} of {self.total} rewards; once the server answers, the same "
            "command goes on from there"
        )

    async def _ask(self, client: httpx.AsyncClient, batch: Sequence[Row]) -> dict[str, float]:
        names = ["prompt", "completion", "answer"]
        names += ["prompt_ids", "completion_ids"] if self.source.send_token_ids else []
        rollouts = [{"id": rollout_id(row)} | {name: row[name] for name in names} for row in batch]
        limit = _FREE_ANSWER_BYTES + _ANSWER_BYTES_PER_ROLLOUT * len(batch)
        try:
            async with client.stream("POST", self.source.url, content=json.dumps({"rollouts": rollouts})) as response:
                self._require_success(response)
                body = bytearray()
                async for piece in response.aiter_raw():
                    body += piece
                    if len(body) > limit:
                        raise NoAnswer(f"its answer is longer than {limit} bytes")
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise NoAnswer(_spell(error)) from None
        return read_answer(bytes(body), ids={item["id"] for item in rollouts})

    def _require_success(self, response: httpx.Response) -> None:
        status = response.status_code
        if status >= 500 or status in _WORTH_ANOTHER_TRY:
            wait = retry_after(response.headers.get("Retry-After"))
            raise NoAnswer(f"status {status}", retry_after_seconds=wait)
        if not 200 <= status < 300:
            hint = "give the address that it leads to" if status < 400 else "correct url, token_env or batch_size"
            raise InputError(
                f"reward source {self.source.name!r}: expected rewards from {self.source.url}, found status {status}, "
                f"which asking again would not change; {hint}, then run the same command again"
            )
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise NoAnswer("its answer is compressed, which was not asked for")


def _pause(failures: int, *, at: str) -> float:
    """Seconds before the next try: doubled each time, with a share that differs from batch to batch, not by chance."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 20))
    return longest * (0.5 + 0.5 * seed_at(0, "pause", at, failures) / 2**63)


def _spell(error: BaseException) -> str:
    """What went wrong on the way, in words of this machine: the text of the error may quote the server."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return "the TLS connection failed"
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            return f"{type(error).__name__}: {os.strerror(cause.errno)}"
        cause = cause.__cause__ or cause.__context__
    return {"ConnectError": "no connection (is the host's name right, and the server up?)"}.get(
        type(error).__name__, f"{type(error).__name__}: the connection broke, or it does not speak HTTP"
    )
