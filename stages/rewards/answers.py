"""What a reward server says: rewards matched by id, or a reason why there are none. Quotes nothing of what it reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from configs.rewards import LARGEST_REWARD


class NoAnswer(Exception):
    """One request that brought no rewards, though another may.

    The message goes to people and logs, so it holds nothing that came from the server. retry_after_seconds: how long
    the server asked to be left alone.
    """

    def __init__(self, reason: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


def read_answer(body: bytes, *, ids: Collection[str]) -> dict[str, float]:
    """The reward of each id. Raises NoAnswer unless there is exactly one finite number for each of them."""
    try:
        document = json.loads(body, object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise NoAnswer("its answer is not JSON of finite numbers, each key once") from None
    listed = document.get("rewards") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise NoAnswer('its answer is not of the form {"rewards": [{"id": ..., "reward": ...}]}')
    if len(listed) != len(ids):
        raise NoAnswer(f"expected {len(ids)} rewards in its answer, found {len(listed)}")
    found: dict[str, float] = {}
    for item in listed:
        name = item.get("id") if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in ids or name in found:
            raise NoAnswer("its answer has a reward for an id that was not asked for, or two for one id")
        found[name] = _finite(item.get("reward"), name=name)
    return found


def _finite(value: Any, *, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_REWARD:
        return float(value)
    raise NoAnswer(f"expected a finite number as reward of {name}, found something else")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError


def retry_after(header: str | None, *, now: datetime | None = None) -> float:
    """Seconds that a Retry-After header asks for, in either of its forms; 0 where it says nothing that can be read."""
    text = (header or "").strip()
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
