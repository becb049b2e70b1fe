"""What a person sees while a run goes on: plain lines, and a progress bar where there is a terminal."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from configs.load import ConfigError
from configs.secrets import redact
from stages.artifacts.errors import RatchetError

_QUIET_SECONDS = 15.0
_PREFECT_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


class ExpectedErrors(logging.Filter):
    """Takes the traceback off what Prefect logs about an error whose message says all that there is to say.

    Takes secrets out of the message, and out of the tracebacks that stay.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        record.msg, record.args = redact(record.getMessage()), ()
        if isinstance(error, ConfigError | RatchetError):
            record.exc_info = record.exc_text = None
        elif error is not None:
            record.msg += "\n" + redact("".join(traceback.format_exception(error)))
            record.exc_info = record.exc_text = None
        return True


_expected_errors = ExpectedErrors()


def hide_expected_tracebacks() -> None:
    """Put the filter on the loggers through which Prefect reports failures. Again does no harm."""
    for name in _PREFECT_LOGGERS:
        logging.getLogger(name).addFilter(_expected_errors)


class Lines:
    """Collects what is said, and says it all or nothing: for a replay that may turn out to be no answer."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Keep the line."""
        self.lines.append(line)

    def progress(self, label: str, what: str, done: int, total: int) -> None:
        """Nothing happens in a replay."""

    def settled(self, label: str) -> None:
        """Nothing happens in a replay."""


class Console:
    """Prints lines; long work gets a bar in a terminal, elsewhere a line every 15 seconds.

    Inside a Prefect flow run each line also goes to the run's log. print_lines: whether lines are printed here
    at all (a worker's runner prints Prefect's log itself).
    """

    def __init__(self, *, print_lines: bool) -> None:
        self.print_lines = print_lines
        self._last = time.monotonic()
        self._bars: Progress | None = None
        self._bar: TaskID | None = None
        self._shown = ""
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """Print the line, and log it to Prefect inside a flow run."""
        self._last = time.monotonic()
        line = redact(line)
        if self.print_lines:
            with self._lock:
                print(line, flush=True)
        if line and FlowRunContext.get() is not None:
            try:
                get_run_logger().info(line)
            except MissingContextError:
                return

    def progress(self, label: str, what: str, done: int, total: int) -> None:
        """Move the bar, or print a line now and then."""
        if self.print_lines and sys.stdout.isatty():
            with self._lock:
                self._move_bar(f"{label}: {what}", done, total)
        elif time.monotonic() - self._last > _QUIET_SECONDS:
            self.say(f"{label}: {what} {done}/{total}")

    def settled(self, label: str) -> None:
        """Take the bar away."""
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
                self._bars = None
                self._shown = ""

    def _move_bar(self, description: str, done: int, total: int) -> None:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True
            )
            self._bars.start()
            self._bar = self._bars.add_task(description, total=total)
        assert self._bar is not None
        if description != self._shown:
            self._bars.reset(self._bar, total=total, description=description)
            self._shown = description
        self._bars.update(self._bar, completed=done)
