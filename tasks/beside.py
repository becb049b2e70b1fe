"""One piece of work beside the flow: a round's rollouts are sampled while the trainer writes down its state and works
on the shards that are there or, with rounds.staleness, while the round before it trains.

What it makes is decided by its jobs, never by which of the two is faster; its outcomes count from where the flow waits
for it, so they stand in the same place in each start of a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

from stages.artifacts.errors import DamagedArtifact, RatchetError
from tasks.run import Run

Made = TypeVar("Made")
_LEAVE_SECONDS = 5.0
_LOOK_SECONDS = 0.2


def begin(work: Callable[[], None]) -> None:
    """Have a thread do `work`, seen by Prefect as a part of the flow run."""
    Thread(target=copy_context().run, args=(work,), daemon=True).start()


@contextmanager
def beside(run: Run, make: Callable[[Run], Made]) -> Iterator[Future[Made]]:
    """Do `make` while the body goes on; when the context closes it is done, and its outcomes follow the body's.

    `make` gets a run of its own and may use the generator alone; the body must leave that alone. If `make` fails, so
    does the body at its next stage. If the body fails or is interrupted, `make` is ended, its generator with it; what
    either has committed stays.
    """
    side, made = run.beside(), Future[Made]()

    def work() -> None:
        try:
            made.set_result(make(side))
        except BaseException as error:
            ends_the_run = isinstance(error, RatchetError) and not isinstance(error, DamagedArtifact)
            if ends_the_run and not side.unwanted.is_set():
                run.display.say(f"{error}; the run ends after the stage that is under way")
            made.set_exception(error)

    run.beside_it = made
    try:
        if run.replay:
            yield made
            work()
        else:
            begin(work)
            yield made
        made.result()
        run.outcomes += side.outcomes
        run.settled = time.monotonic()  # what the flow waited for is the cost of what was made beside it
    except BaseException as error:
        if not run.replay:  # where it has not begun, or is over
            goes_on = isinstance(error, DamagedArtifact)  # in this process, with the same workers
            _end(side, made, within=math.inf if goes_on else _LEAVE_SECONDS)
        raise
    finally:
        run.beside_it = None


def _end(side: Run, made: Future[Made], *, within: float) -> None:
    """Have work that is not wanted any more come to its end: whatever its generator does, it is killed."""
    side.unwanted.set()
    deadline = time.monotonic() + within
    while not made.done() and time.monotonic() < deadline:
        side.pool(side.generator_spec()).interrupt()
        wait([made], timeout=_LOOK_SECONDS)
