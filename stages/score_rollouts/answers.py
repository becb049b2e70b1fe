"""Answers of a reward server, kept in the attempt until the artifact is whole. Knows neither server nor rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.artifacts.durable import canonical_json, digest_bytes, read_json, remove, write_json
from stages.artifacts.seals import adopt, seal
from stages.artifacts.store import earlier_attempts


class AnswersOfAttempt:
    """One sealed file per answered batch; a later attempt at the same artifact adopts them.

    Files are named after source and ids, so that another batch_size asks again instead of mistaking one for another.
    """

    def __init__(self, attempt: Path, *, source: str) -> None:
        self._attempt = attempt
        self._source = source
        self._earlier = earlier_attempts(attempt)
        self._paths: list[Path] = []

    def find(self, ids: Sequence[str]) -> dict[str, float] | None:
        """The rewards of a batch that an earlier attempt got."""
        path = self._path(ids)
        if not adopt(path, earlier=self._earlier):
            return None
        self._paths.append(path)
        found: dict[str, float] = read_json(path)
        return found

    def keep(self, rewards: dict[str, float]) -> None:
        """Make the rewards of a batch durable."""
        path = self._path(list(rewards))
        write_json(path, rewards)
        seal(path)
        self._paths.append(path)

    def clear(self) -> None:
        """Delete what was kept: all of it stands in the artifact now."""
        for path in self._paths:
            remove(path)

    def _path(self, ids: Sequence[str]) -> Path:
        return self._attempt / f"answers-{digest_bytes(canonical_json([self._source, sorted(ids)]))[:32]}.json"
