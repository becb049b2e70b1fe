"""DONE? LAUNCH. CHECK. COMMIT. The one place where a job becomes an artifact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, cast

import prefect
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.runtime import task_run
from prefect.states import Completed

from stages.artifacts import layout, store
from stages.artifacts.durable import read_json, write_json
from stages.artifacts.errors import RatchetError, TransientError, WorkersLost
from stages.artifacts.lease import Lease
from stages.artifacts.manifest import Manifest
from stages.artifacts.reference import ArtifactRef
from stages.job import Job
from tasks.run import Costs, NotDone, Outcome, Run

P = ParamSpec("P")
_BACKOFF_SECONDS = 1.0


def stage_task(function: Callable[P, Outcome]) -> Callable[P, Outcome]:
    """Make `function`, whose first argument is the run, a Prefect task inside a flow run, and a plain call outside one.

    Its task runs are named after the round or the moment and the stage: `round-000 generate_rollouts`. A lost worker
    is worth another try: `resources.attempts` in all, with longer and longer waits, made by Prefect where there is
    one. Prefect does not cache it: manifests say what is done. An artifact that was there already shows as the state
    "Cached".
    """

    def words(given: Mapping[str, Any]) -> list[str]:
        stage, index = function.__name__, given.get("round_index")
        when = given.get("moment") or str(given.get("label", "")).removesuffix(stage).rstrip("-")
        when = when or ("" if index is None else f"round-{index:03d}")
        return [when, stage] if when else [stage]

    def attempt(number: int, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """One try. Says what was lost, and that another follows or that this was the last."""
        run = cast(Run, args[0])
        label, most = "-".join(words(kwargs)), run.config.resources.attempts
        try:
            return function(*args, **kwargs)
        except TransientError as error:
            if not _is_lost_worker(error):
                raise
            run.require_going_on()
            if number >= most:
                raise WorkersLost(f"{label}: attempt {number} of {most} lost, the last: {error}") from error
            run.display.say(f"{label}: attempt {number} of {most} lost: {error}; trying again")
            raise

    @wraps(function)
    def as_state(*args: P.args, **kwargs: P.kwargs) -> Any:
        outcome = attempt(task_run.run_count, *args, **kwargs)
        return Completed(name="Cached", data=outcome) if outcome.reused else outcome

    task: Any = prefect.task(
        cache_policy=NO_CACHE,
        task_run_name=lambda: " ".join(words(task_run.parameters)),
        persist_result=False,
        retry_condition_fn=_may_try_again,
    )(as_state)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Outcome:
        delays = _backoff(cast(Run, args[0]))
        if FlowRunContext.get() is not None:
            result: Any = task.with_options(retries=len(delays), retry_delay_seconds=delays)(*args, **kwargs)
            return cast(Outcome, result.result() if isinstance(result, State) else result)
        for number, delay in enumerate(delays, start=1):
            try:
                return attempt(number, *args, **kwargs)
            except TransientError as error:
                if not _is_lost_worker(error):
                    raise
                time.sleep(delay)
        return attempt(len(delays) + 1, *args, **kwargs)

    return call


def _backoff(run: Run) -> list[float]:
    """The waits between attempts: one fewer than there are attempts."""
    return [_BACKOFF_SECONDS * 2**number for number in range(run.config.resources.attempts - 1)]


def _is_lost_worker(error: object) -> bool:
    """Whether trying again may help. Kinds of TransientError of their own have had their retries already."""
    return type(error) is TransientError


def _may_try_again(task: Any, run: Any, state: State) -> bool:
    return _is_lost_worker(state.data)


def complete(run: Run, job: Job, *, label: str) -> Outcome:
    """Return the artifact of `job`, making it if it is not committed.

    label: names job file, log lines and metrics within the run. Raises NotDone in a replay, DamagedArtifact if
    a committed artifact does not match its manifest, and what the stage raised.
    """
    if not run.replay:
        run.require_going_on()
        run.lease.require()
    kept = run.kept.get(label)
    manifest = store.verify(job.store, kept) if kept is not None else None
    if kept is not None and manifest is not None:
        return _finish(run, kept, _Made(manifest), label=label, reused=True)
    manifest = store.verify(job.store, job.ref)
    if manifest is not None:
        store.require_parents(job.store, manifest)
    if manifest is None and run.replay:
        raise NotDone(label)
    if not run.replay:
        job_file(run, job, label=label)
    made = _Made(manifest) if manifest is not None else None
    reused = made is not None
    if made is None:
        lock = layout.lock(job.store, job.STAGE, job.fingerprint)
        with Lease(lock, what=f"artifact {job.ref}", take_over=run.lease.take_over) as lease:
            manifest = store.verify(job.store, job.ref)
            made = _Made(manifest) if manifest is not None else _make(run, job, label=label, lease=lease)
        run.display.settled(label)
        run.announce_workers()
    elif not run.replay:
        store.clear_attempts(job)
    return _finish(run, job.ref, made, label=label, reused=reused)


def job_file(run: Run, job: Job, *, label: str) -> Path:
    """Write down what a stage is asked for, unless it stands there already, and return where."""
    path = layout.run_job(run.directory, label)
    if not _says(path, job.document()):
        write_json(path, job.document())
    return path


@dataclass(frozen=True)
class _Made:
    """An artifact's manifest, and what making it took: nothing where it was there."""

    manifest: Manifest
    start_seconds: float = 0.0
    work_seconds: float = 0.0
    commit_seconds: float = 0.0
    least_seconds: float = 0.0


def _finish(run: Run, ref: ArtifactRef, made: _Made, *, label: str, reused: bool) -> Outcome:
    manifest, now = made.manifest, time.monotonic()
    costs = Costs(
        seconds=now - run.settled,
        start_seconds=made.start_seconds,
        work_seconds=made.work_seconds,
        commit_seconds=made.commit_seconds,
        ahead_seconds=run.ahead_seconds.pop(label, 0.0),
        least_seconds=made.least_seconds,
        bytes=0 if reused else sum(entry.bytes for entry in manifest.files.values()),
    )
    run.settled = now
    outcome = Outcome(
        label=label,
        ref=ref,
        metrics=manifest.metrics,
        seconds=manifest.wall_seconds,
        reused=reused,
        path=ref.path(run.store),
        costs=costs,
    )
    run.outcomes.append(outcome)
    run.display.say(
        f"{label:<38} {'already done' if reused else f'{outcome.seconds:6.1f} s'}  {_shown(outcome)}".rstrip()
    )
    return outcome


def _says(path: Path, document: dict[str, Any]) -> bool:
    """Whether the job file is there and whole."""
    try:
        return bool(read_json(path) == document)
    except (OSError, ValueError):
        return False


def _make(run: Run, job: Job, *, label: str, lease: Lease) -> _Made:
    """Launch, then commit. Raises TransientError if a worker is lost."""
    pool = run.pool(run.generator_spec() if job.WORKER == "generator" else run.trainer_spec())
    attempt = store.new_attempt(job)

    def show(what: str, done: int, total: int) -> None:
        run.display.progress(label, what, done, total)

    run.make_room_for(pool.spec, on_progress=show)
    started = time.monotonic()
    try:
        metrics = pool.run(
            layout.run_job(run.directory, label),
            attempt,
            on_progress=show,
            all_ranks=job.WORKER == "generator" or job.compute.ranks == pool.spec.ranks,
            before=run.lease.require,  # who was stopped while they started must leave nothing in another's store
        )
    except RatchetError:
        run.lease.require()  # whoever took the run over has cleared this attempt away: that is the reason
        raise
    ended = time.monotonic()
    manifest = store.commit(job, attempt, metrics=metrics, wall_seconds=ended - started, leases=[lease, run.lease])
    starting = pool.waited_seconds + pool.models_seconds
    return _Made(
        manifest,
        start_seconds=starting,
        work_seconds=ended - started - starting,
        commit_seconds=time.monotonic() - ended,
        least_seconds=pool.least_seconds,
    )


def _shown(outcome: Outcome) -> str:
    """The few figures of a stage that belong on its line."""
    shown = {
        "train_sft": ("train_loss", "held_out_loss"),
        "train_reward_model": ("held_out_accuracy", "calibration_error"),
        "generate_rollouts": ("generated_tokens",),
        "score_rollouts": ("total_mean",),
        "select_rollouts": ("groups_selected", "dropped_group_fraction"),
        "compute_logprobs": ("logprob_difference_max",),
        "estimate_advantages": ("kl_to_ref_mean",),
        "update_policy": ("policy_loss", "clip_fraction", "entropy"),
    }.get(outcome.ref.stage, ())
    return "  ".join(f"{name} {outcome.metrics[name]:.4g}" for name in shown if name in outcome.metrics)
