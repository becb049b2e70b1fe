"""One run: its configuration, its directory, its workers, and what it says to the person watching."""

from __future__ import annotations

import copy
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from configs.schema import RunConfig
from stages.artifacts import layout
from stages.artifacts.durable import canonical_json, digest_bytes, remove_temporaries, write_json
from stages.artifacts.errors import RatchetError
from stages.artifacts.lease import Lease
from stages.artifacts.reference import ArtifactRef
from stages.job import Compute
from stages.workers import OnProgress, PoolSpec, WorkerPool
from tasks.kept import kept_stages


class NotDone(Exception):
    """A replay met an artifact that is not committed yet."""


class Unwanted(RatchetError):
    """Nobody waits any more for what a stage would make."""


class Display(Protocol):
    """Where a run's lines and progress go."""

    def say(self, line: str) -> None:
        """One finished line."""

    def progress(self, label: str, what: str, done: int, total: int) -> None:
        """How far a stage is."""

    def settled(self, label: str) -> None:
        """A stage has ended; its progress need not be shown any more."""


@dataclass(frozen=True)
class Costs:
    """Where the wall time between the end of the stage before and the end of this one went.

    start_seconds: until its workers were ready, and until these had made their engines and models. work_seconds: in
    the stage itself. commit_seconds: hashing, flushing,
    signing and naming the artifact. The rest, waiting_seconds, is the orchestration's: Prefect, looking up what is
    done, leases, the report, and attempts that were lost. ahead_seconds: before all that, beside the sampling of
    its rollouts. bytes: of the artifact. least_seconds: in which the stage's devices could have done
    its work, by their measured limits; 0 where these are not known.
    """

    seconds: float
    start_seconds: float = 0.0
    work_seconds: float = 0.0
    commit_seconds: float = 0.0
    ahead_seconds: float = 0.0
    bytes: int = 0
    least_seconds: float = 0.0

    @property
    def waiting_seconds(self) -> float:
        """What is left."""
        return self.seconds - self.start_seconds - self.work_seconds - self.commit_seconds


@dataclass(frozen=True)
class Outcome:
    """What a task came to. reused: the artifact was there already. seconds: what making it took, then or now.

    costs: of this start of the run.
    """

    label: str
    ref: ArtifactRef
    metrics: dict[str, float]
    seconds: float
    reused: bool
    path: Path
    costs: Costs


# What says where and on what a run is made, not what: with another value it is the same run.
_NOT_IN_THE_NAME: Any = {
    **dict.fromkeys(("store", "tracking", "resources", "retention"), True),
    **{part: {"snapshot_every"} for part in ("rounds", "sft", "reward_model")},
}


def run_name(config: RunConfig) -> str:
    """The name of the run that a configuration asks for, under which its directory lies in the store."""
    recipe = config.model_dump(mode="json", exclude=_NOT_IN_THE_NAME)
    return f"{config.name}-{digest_bytes(canonical_json(recipe))[:8]}"


class Run:
    """An open run. As a context it holds the run directory's lease and ends its workers on the way out.

    replay: only look things up; meeting anything unfinished raises NotDone. take_over: take the run from an owner
    that holds it still, and so is stopped or out of reach. kept: finished stages that are taken as they are, by label,
    whatever their recipe would be now. ahead_seconds: by label, how long stages were worked on before they began
    (tasks.ahead). beside_it: what is made at the same time (tasks.beside). unwanted: set once nobody waits any more
    for what this one makes.
    """

    def __init__(self, config: RunConfig, *, display: Display, replay: bool = False, take_over: bool = False) -> None:
        self.config = config
        self.display = display
        self.replay = replay
        self.store = Path(config.store).resolve()
        self.name = run_name(config)
        self.directory = layout.run_directory(self.store, self.name)
        self.kept = kept_stages(self.directory)
        self.outcomes: list[Outcome] = []
        self.ahead_seconds: dict[str, float] = {}
        self.started = self.settled = time.monotonic()
        self._pools: dict[PoolSpec, WorkerPool] = {}
        self._announced: dict[PoolSpec, float] = {}
        self._lock = threading.Lock()
        self.beside_it: Future[Any] | None = None
        self.unwanted = threading.Event()
        self.lease = Lease(self.directory / "lease", what=f"run {self.name}", take_over=take_over)

    def __enter__(self) -> Run:
        if not self.replay:
            self.lease.__enter__()
            remove_temporaries(self.directory)
            write_json(self.directory / "config.json", self.config.model_dump(mode="json"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.close() if kind is None else pool.kill()
        self.lease.__exit__(kind, error, trace)

    def beside(self) -> Run:
        """This run for work at the same time: the same lease, workers and display, outcomes of its own."""
        side = copy.copy(self)
        side.outcomes, side.settled = [], time.monotonic()
        side.beside_it, side.unwanted = None, threading.Event()
        return side

    def require_going_on(self) -> None:
        """Raise what the work beside this one has failed with, Unwanted if nobody waits for this one any more."""
        if self.unwanted.is_set():
            raise Unwanted("given up: what the trainer did at the same time has failed or was interrupted")
        if self.beside_it is not None and self.beside_it.done():
            self.beside_it.result()

    def pool(self, spec: PoolSpec) -> WorkerPool:
        """The resident workers of this kind; made, but not started, on the first call."""
        with self._lock:
            if spec not in self._pools:
                logs, stall = self.directory / "logs", self.config.resources.stall_seconds
                self._pools[spec] = WorkerPool(spec, logs=logs, stall_seconds=stall)
            return self._pools[spec]

    def announce_workers(self) -> None:
        """Say of workers that were started since how long that took: a restart costs it, a resident worker does not."""
        for spec, pool in list(self._pools.items()):
            if pool.start_seconds > 0.0 and self._announced.get(spec) != pool.start_seconds:
                self._announced[spec] = pool.start_seconds
                self.display.say(f"{spec.kind} ready after {pool.start_seconds:.1f} s")

    def release_trainer(self) -> None:
        """End the trainer on GPUs after a training stage: DeepSpeed does not free an engine in a live process."""
        if self.config.resources.trainer.gpus:
            self.pool(self.trainer_spec()).close()

    def trainer(self, *, every_rank: bool) -> Compute:
        """What trainer stages run on: all ranks together, or one process for the stages that need only one."""
        resources = self.config.resources.trainer
        ranks = resources.ranks if every_rank else 1
        return Compute(
            device="cuda" if resources.gpus else "cpu",
            ranks=ranks,
            threads=resources.threads,
            gpus=resources.gpus[:ranks],
        )

    def generator(self) -> Compute:
        """What generation runs on."""
        resources = self.config.resources.generator
        return Compute(
            device="cuda" if resources.gpus else "cpu",
            ranks=resources.engines,
            threads=resources.threads,
            gpus=resources.gpus,
        )

    def generator_spec(self) -> PoolSpec:
        """The generator's pool, so that it can be started before it is needed."""
        return self._spec("generator", self.generator(), kv_cache_gib=self.config.resources.generator.kv_cache_gib)

    def trainer_spec(self) -> PoolSpec:
        """The trainer's pool. A stage that needs one process runs on rank 0 of the same pool."""
        return self._spec("trainer", self.trainer(every_rank=True))

    def _spec(self, kind: Literal["trainer", "generator"], compute: Compute, *, kv_cache_gib: int = 1) -> PoolSpec:
        return PoolSpec(
            kind=kind,
            device=compute.device,
            ranks=compute.ranks,
            threads=compute.threads,
            gpus=compute.gpus,
            kv_cache_gib=kv_cache_gib,
            takes_turns=self.config.resources.take_turns,
            works_beside=self.config.rounds.staleness > 0,
        )

    @property
    def has_devices_for_both(self) -> bool:
        """Whether neither generator nor trainer is slower while the other works: GPUs or cores of its own for each."""
        if self.config.resources.take_turns:
            return False
        generator, trainer = self.config.resources.generator, self.config.resources.trainer
        if generator.gpus:
            return True
        threads = generator.engines * generator.threads + trainer.ranks * trainer.threads
        return threads <= len(os.sched_getaffinity(0))

    def make_room_for(self, spec: PoolSpec, *, on_progress: OnProgress) -> None:
        """Where workers take turns, have all others leave the devices."""
        if self.config.resources.take_turns:
            for other, pool in self._pools.items():
                if other != spec:
                    pool.rest(on_progress=on_progress)
