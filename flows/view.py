"""What Prefect's UI shows of a run: tables, links, progress, summary. A run does not need it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.context import FlowRunContext

from flows.round import RoundResult
from flows.server import server_answers
from tasks.run import Run

_PUBLISH_SECONDS = 10.0


class PrefectView:
    """The artifacts of one flow run; none outside of one. Raises ConnectionError if the server is away."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._progress: Any = None
        self._unpublished: list[RoundResult] = []
        self._published_at = -_PUBLISH_SECONDS

    def add_round(self, result: RoundResult, table: Sequence[dict[str, str]]) -> None:
        """Table, link and progress. Short rounds are shown several together: the server may share their cores."""
        index, count = result.round_index, self._run.config.rounds.count
        self._unpublished.append(result)
        if index + 1 < count and time.monotonic() - self._published_at < _PUBLISH_SECONDS:
            return
        unpublished, self._unpublished = self._unpublished, []
        self._published_at = time.monotonic()
        if not _is_watched():
            return
        percent = 100.0 * (index + 1) / count
        create_table_artifact(table=list(table), key="rounds", description=f"Newest rounds of run {self._run.name}")
        for each in unpublished:
            rollouts = each.sampling.rollouts.path / "rollouts-00000.arrow"
            create_link_artifact(
                link=rollouts.as_uri(),
                key=f"round-{each.round_index:03d}-rollouts",
                link_text=str(rollouts),
                description=f"Rollouts of round {each.round_index} of run {self._run.name}",
            )
        if self._progress is None:
            description = f"Rounds of run {self._run.name} that are done"
            self._progress = create_progress_artifact(progress=percent, key="progress", description=description)
        else:
            update_progress_artifact(artifact_id=self._progress, progress=percent)

    def finish(self, lines: Sequence[str]) -> None:
        """The summary."""
        if not _is_watched():
            return
        text = "\n".join(lines).strip()
        description = f"Summary of run {self._run.name}"
        create_markdown_artifact(markdown=f"```text\n{text}\n```", key="summary", description=description)


def _is_watched() -> bool:
    """Whether Prefect watches this run. Raises ConnectionError if it should and its server is away."""
    if FlowRunContext.get() is None:
        return False
    if not server_answers():
        raise ConnectionError("Prefect's server does not answer; the run goes on without its view")
    return True
