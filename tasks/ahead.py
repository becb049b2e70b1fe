"""While rollouts are still being sampled, the trainer works on those that are there.

What it makes of each shard is sealed in an unfinished attempt, and the stage that it is for adopts it. Nothing is
decided by who is faster: every shard is worked on here, in order, whether it was there in time or not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.artifacts import layout, store
from stages.artifacts.errors import LeaseHeld, RatchetError, SourceUnavailable, TransientError
from stages.artifacts.lease import Lease
from stages.artifacts.seals import find_sealed
from stages.generate_rollouts.job import GenerateRollouts
from stages.job import Job
from stages.rollout_shards import ROLLOUTS, RolloutShard, shards_of
from tasks.launch import job_file
from tasks.run import Run

_LOOK_SECONDS = 0.05


def work_ahead(run: Run, rollouts: GenerateRollouts, jobs: Mapping[str, Job], *, until: Future[Any]) -> None:
    """Do `jobs`, by label, on those rollouts, shard by shard as they come; what is left of each is to gather it.

    until: done when the rollouts are committed. Nothing is done ahead where one shard is all, or where generator and
    trainer would only share their cores. Whatever a stage raises, the rest is left to it, so that it says so in its
    turn. Raises what the rollouts ended with.
    """
    shards = run.config.rounds.shards
    if run.replay or shards < 2 or not run.has_devices_for_both:
        return
    with ExitStack() as leases:
        begun: list[_Begun] | None = None
        for index in range(shards):
            shard = _wait_for(run, rollouts, index, until=until)
            if begun is None:
                found = [_begin(run, job, label, leases) for label, job in jobs.items()]
                begun = [one for one in found if one is not None]
            try:
                for one in begun:
                    one.make(run, shard)
            except RatchetError as error:
                run.require_going_on()
                run.lease.require()
                if isinstance(error, TransientError | SourceUnavailable):
                    round_index = rollouts.parameters.round_index
                    run.display.say(f"worked on ahead, round {round_index}: {error}; done in its turn")
                run.pool(run.trainer_spec()).start()
                return


@dataclass(frozen=True)
class _Begun:
    """A job that is worked on ahead, in an attempt of its own."""

    label: str
    job: Job
    attempt: Path

    def make(self, run: Run, shard: RolloutShard) -> None:
        """What it makes of one shard of rollouts."""
        started, pool = time.monotonic(), run.pool(run.trainer_spec())
        pool.run(
            layout.run_job(run.directory, self.label),
            self.attempt,
            on_progress=lambda what, done, total: run.display.progress(self.label, what, done, total),
            all_ranks=self.job.compute.ranks == pool.spec.ranks,
            shard=shard,
            before=run.lease.require,
        )
        run.display.settled(self.label)
        seconds = run.ahead_seconds.get(self.label, 0.0) + time.monotonic() - started
        run.ahead_seconds[self.label] = seconds


def _begin(run: Run, job: Job, label: str, leases: ExitStack) -> _Begun | None:
    """A job, held until `leases` end. None where it is done, stays as it was, or is made by another run."""
    if label in run.kept or store.verify(job.store, job.ref) is not None:
        return None
    lock = layout.lock(job.store, job.STAGE, job.fingerprint)
    try:
        leases.enter_context(Lease(lock, what=f"artifact {job.ref}", take_over=run.lease.take_over))
    except LeaseHeld:
        run.lease.require()
        return None
    job_file(run, job, label=label)
    return _Begun(label, job, store.new_attempt(job))


def _wait_for(run: Run, rollouts: GenerateRollouts, index: int, *, until: Future[Any]) -> RolloutShard:
    """A shard of rollouts, once it is finished. Raises what they ended with if they never will be."""
    name = layout.shard(Path(), ROLLOUTS, index).name
    while True:
        run.require_going_on()
        run.lease.require()
        if until.done():
            until.result()
            return shards_of(run.store, rollouts.ref)[index]
        attempt = store.newest_attempt(rollouts)
        found = find_sealed(name, attempts=[attempt]) if attempt is not None else None
        if found is not None:
            path, mark = found
            return RolloutShard(index, mark.sha256, (path, rollouts.ref.path(run.store) / name))
        wait([until], timeout=_LOOK_SECONDS)
