"""Resident workers: the processes that hold vLLM engines and DeepSpeed ranks between jobs.

A worker is a cache, never the truth: it can be lost at any moment and the job run again by another. Knows how to
start, feed, watch and end processes; knows nothing of Prefect or of what a stage computes.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from stages.artifacts.errors import TransientError
from stages.job import Job
from stages.rendezvous import Rendezvous
from stages.rollout_shards import RolloutShard
from stages.shelter import sheltered
from stages.stacks import Suspect, save_stacks
from stages.worker import WorkerProcess, reported_error

START_SECONDS = 180.0
_WARM = {
    "trainer": "torch,transformers,deepspeed,deepspeed.runtime.zero.muon.muon_optimizer",
    "generator": "vllm,vllm.entrypoints.llm,vllm.v1.worker.gpu_model_runner",
}
"""What engines import sooner or later, so that it is not in anybody's way: also on CPU a part is named after GPUs."""
KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""On CPU tensors of up to 32 MiB are given memory that was used before: fresh pages cost more than most operations."""
_ROOT = Path(__file__).resolve().parents[1]

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PoolSpec:
    """What a pool of workers runs on: one process per rank.

    takes_turns: its devices are another pool's as well. works_beside: another pool works all the while.
    """

    kind: Literal["trainer", "generator"]
    device: Literal["cpu", "cuda"]
    ranks: int
    threads: int
    gpus: tuple[int, ...] = ()
    kv_cache_gib: int = 1
    takes_turns: bool = False
    works_beside: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """What its processes are told on their command line."""
        return ("--warm", _WARM[self.kind], *(("--takes-turns",) if self.takes_turns else ()))

    @property
    def spin_count(self) -> str:
        """How often an idle OpenMP thread looks for work before it sleeps: never where it would keep others waiting."""
        has_cores = self.ranks * self.threads <= len(os.sched_getaffinity(0))
        return "10000" if has_cores and not self.works_beside else "0"

    @classmethod
    def of(cls, job: Job) -> PoolSpec:
        """The pool that a job asks for."""
        compute = job.compute
        generator = getattr(getattr(job, "parameters", None), "generator", None)
        return cls(
            kind=job.WORKER,
            device=compute.device,
            ranks=compute.ranks,
            threads=compute.threads,
            gpus=compute.gpus,
            kv_cache_gib=generator.kv_cache_gib if generator else 1,
        )


class WorkerPool:
    """The processes of one kind, started together, fed the same job, and lost together.

    run() hands a job to every rank and waits. It watches progress, not only liveness: a pool that says nothing for
    `stall_seconds` counts as lost, as does one of whose processes one ends. Trainer ranks wait for one another, so
    the progress of one is that of all; engines do not.
    """

    def __init__(self, spec: PoolSpec, *, logs: Path, stall_seconds: float = 600.0) -> None:
        self.spec = spec
        self.logs = logs
        self.stall_seconds = stall_seconds
        self.start_seconds = 0.0
        self.waited_seconds = 0.0
        self.models_seconds = 0.0
        self.least_seconds = 0.0
        self._workers: list[WorkerProcess] = []
        self._rendezvous: Rendezvous | None = None
        self._started = 0.0
        self._ready = False
        self._at_rest = False
        self._ending = threading.RLock()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_started(self) -> bool:
        """Whether its processes exist."""
        return bool(self._workers)

    def start(self) -> None:
        """Start the processes and return at once; they import their libraries meanwhile."""
        if self._workers:
            return
        self._ready = False
        self._started = time.monotonic()
        self._rendezvous = Rendezvous()
        for rank in range(self.spec.ranks):
            env = self._environment(rank, self._rendezvous.path / "rendezvous")
            log = self.logs / f"{self.spec.kind}-{rank}.log"
            self._workers.append(WorkerProcess(rank, env=env, log=log, arguments=self.spec.arguments))

    def rest(self, *, on_progress: OnProgress) -> None:
        """Have its processes leave their devices, if they are there; run() takes them again."""
        if not self._ready or self._at_rest:
            return
        try:
            for worker in self._workers:
                worker.send({"rest": True})
            self._collect(self._workers, deadline=self.stall_seconds, until="rested", on_progress=on_progress)
            self._at_rest = True
        except TransientError:
            self.kill()  # it holds nothing any more, and that is what was asked

    def run(
        self,
        job: Path,
        out: Path,
        *,
        on_progress: OnProgress,
        all_ranks: bool = True,
        shard: RolloutShard | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Run one job on every rank (or on rank 0 alone) and return its metrics. before: called once they are ready.

        shard: the one of its rollouts that is to be worked on alone, and then without metrics.
        Trainer ranks work on one thing, so rank 0 speaks for them; engines do shares, so theirs are added up.

        Raises TransientError if a worker is lost, else what the stage or `before` raised.
        """
        called = time.monotonic()
        self.start()
        try:
            if not self._ready:
                self._collect(self._workers, deadline=START_SECONDS, until="ready", on_progress=on_progress)
                self._ready = True
                self.start_seconds = time.monotonic() - self._started
            self.waited_seconds = time.monotonic() - called
            workers = self._workers if all_ranks else self._workers[:1]
            before()
            self._at_rest = False
            order: dict[str, Any] = {"job": str(job), "out": str(out)}
            if shard is not None:
                order["shard"] = shard.order()
            for worker in workers:
                worker.send(order)
            results = self._collect(workers, deadline=self.stall_seconds, until="done", on_progress=on_progress)
        except BaseException:
            self.kill()
            raise
        self.models_seconds = max(result.get("start", 0.0) for result in results)
        self.least_seconds = max(result.get("least", 0.0) for result in results)
        shares = [result["done"] for result in results]
        if self.spec.kind == "generator":
            return {name: sum(share[name] for share in shares) for name in shares[0]}
        return dict(shares[0])

    def _collect(
        self, workers: list[WorkerProcess], *, deadline: float, until: str, on_progress: OnProgress
    ) -> list[dict[str, Any]]:
        """Read replies until every worker has said `until`."""
        answers: dict[int, dict[str, Any]] = {}
        heard = dict.fromkeys((worker.rank for worker in workers), time.monotonic())
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            while len(answers) < len(workers):
                events = selector.select(timeout=0.5)
                for key, _ in events:
                    worker = key.data
                    heard[worker.rank] = time.monotonic()
                    for message in worker.read():
                        if "progress" in message:
                            if worker.rank == 0:
                                on_progress(*message["progress"])
                        elif "error" in message:
                            raise reported_error(message, log=worker.log)
                        elif until in message:
                            answers[worker.rank] = message
                waiting = [worker for worker in workers if worker.rank not in answers]
                for worker in waiting:
                    worker.require_alive()
                if silent := self._silent(waiting, heard, deadline):
                    raise self._hung(silent, deadline)
        return [answers[worker.rank] for worker in workers]

    def _silent(self, waiting: list[WorkerProcess], heard: dict[int, float], deadline: float) -> list[WorkerProcess]:
        """Those of `waiting` that have shown no progress for too long."""
        latest = max(heard.values())
        together = self.spec.kind == "trainer"
        now = time.monotonic()
        return [worker for worker in waiting if now - (latest if together else heard[worker.rank]) > deadline]

    def _hung(self, silent: list[WorkerProcess], deadline: float) -> TransientError:
        """The error that names the ranks, once what every process of the pool was doing is saved."""
        why = f"worker rank {[worker.rank for worker in silent]}: expected progress within {deadline:g} s, found none"
        suspects = [Suspect(worker.rank, worker.child.pid, worker.stacks) for worker in self._workers]
        try:
            saved = str(save_stacks(suspects, logs=self.logs, kind=self.spec.kind, why=why))
        except OSError as error:
            saved = f"could not be saved ({error})"
        return TransientError(f"{self.spec.kind} {why}; what its processes did: {saved}; log: {silent[0].log}")

    def interrupt(self) -> None:
        """From another thread than that of run(), which then raises TransientError: kill whatever is there."""
        for worker in list(self._workers):
            worker.child.signal_kill()

    def kill(self) -> None:
        """End every process of the pool at once; the next run() starts new ones."""
        with self._ending:
            self.interrupt()
            for worker in self._workers:
                worker.child.kill()
                worker.close()
            self._forget()

    def close(self) -> None:
        """End the pool: nothing in it is worth keeping."""
        with self._ending:
            for worker in self._workers:
                worker.child.close(grace_seconds=10.0)
                worker.close()
            self._forget()

    def _forget(self) -> None:
        self._workers = []
        self._ready = self._at_rest = False
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _environment(self, rank: int, rendezvous: Path) -> dict[str, str]:
        """The environment of one rank: pinned threads and seeds, nothing that phones home, loopback only."""
        spec = self.spec
        env = {
            **sheltered(os.environ, device=spec.device),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), str(Path.cwd()), os.environ.get("PYTHONPATH")])),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": str(spec.threads),
            "MKL_NUM_THREADS": str(spec.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", spec.spin_count),
            "TOKENIZERS_PARALLELISM": "false",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank) if spec.device == "cpu" else "0",
            "WORLD_SIZE": str(spec.ranks),
            "RATCHET_RENDEZVOUS": str(rendezvous),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        if spec.kind == "generator":
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
            env |= {"RATCHET_ENGINE": str(rank), "RATCHET_ENGINES": str(spec.ranks)}
            env["VLLM_CPU_KVCACHE_SPACE"] = str(spec.kv_cache_gib)
        if spec.device == "cpu":
            env = KEPT_MEMORY | env
            env["DS_ACCELERATOR"] = "cpu"
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif spec.gpus:
            share = len(spec.gpus) // spec.ranks
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(g) for g in spec.gpus[rank * share : (rank + 1) * share])
        return env
