"""Resident workers: the processes that hold vLLM engines and DeepSpeed ranks between jobs.

A worker is a cache, never the truth: it can be lost at any moment and the job run again by another. Knows how to
start, feed, watch and end processes; knows nothing of Prefect or of what a stage computes.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from stages.artifacts.errors import (
    DamagedArtifact,
    GateError,
    InputError,
    RatchetError,
    ReleasedArtifact,
    SourceUnavailable,
    StoreFull,
    TransientError,
)
from stages.job import Job
from stages.process import ChildProcess
from stages.rendezvous import Rendezvous
from stages.shelter import sheltered
from stages.stacks import Suspect, save_stacks

START_SECONDS = 180.0
_ERRORS: dict[str, type[RatchetError]] = {
    error.kind: error for error in (InputError, GateError, SourceUnavailable, StoreFull, TransientError)
}
_ARTIFACT_ERRORS = {error.kind: error for error in (DamagedArtifact, ReleasedArtifact)}
_WARM = {"trainer": "torch,transformers,deepspeed", "generator": "vllm"}
_ROOT = Path(__file__).resolve().parents[1]

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PoolSpec:
    """What a pool of workers runs on: one process per rank."""

    kind: Literal["trainer", "generator"]
    device: Literal["cpu", "cuda"]
    ranks: int
    threads: int
    gpus: tuple[int, ...] = ()
    kv_cache_gib: int = 1

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
        self._workers: list[_Worker] = []
        self._rendezvous: Rendezvous | None = None
        self._started = 0.0
        self._ready = False
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
            self._workers.append(_Worker(rank, env=env, log=log, warm=_WARM[self.spec.kind]))

    def run(self, job: Path, out: Path, *, on_progress: OnProgress, all_ranks: bool = True) -> dict[str, float]:
        """Run one job on every rank (or on rank 0 alone) and return its metrics.

        Trainer ranks work on one thing, so rank 0 speaks for them; engines do shares, so theirs are added up.

        Raises TransientError if a worker is lost, else what the stage raised.
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
            for worker in workers:
                worker.send({"job": str(job), "out": str(out)})
            results = self._collect(workers, deadline=self.stall_seconds, until="done", on_progress=on_progress)
        except BaseException:
            self.kill()
            raise
        shares = [result["done"] for result in results]
        if self.spec.kind == "generator":
            return {name: sum(share[name] for share in shares) for name in shares[0]}
        return dict(shares[0])

    def _collect(
        self, workers: list[_Worker], *, deadline: float, until: str, on_progress: OnProgress
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
                            raise _error(message, worker)
                        elif until in message:
                            answers[worker.rank] = message
                waiting = [worker for worker in workers if worker.rank not in answers]
                for worker in waiting:
                    worker.require_alive()
                if silent := self._silent(waiting, heard, deadline):
                    raise self._hung(silent, deadline)
        return [answers[worker.rank] for worker in workers]

    def _silent(self, waiting: list[_Worker], heard: dict[int, float], deadline: float) -> list[_Worker]:
        """Those of `waiting` that have shown no progress for too long."""
        latest = max(heard.values())
        together = self.spec.kind == "trainer"
        now = time.monotonic()
        return [worker for worker in waiting if now - (latest if together else heard[worker.rank]) > deadline]

    def _hung(self, silent: list[_Worker], deadline: float) -> TransientError:
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
        self._ready = False
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
            env["DS_ACCELERATOR"] = "cpu"
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif spec.gpus:
            share = len(spec.gpus) // spec.ranks
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(g) for g in spec.gpus[rank * share : (rank + 1) * share])
        return env


class _Worker:
    """One process and its two pipes."""

    def __init__(self, rank: int, *, env: dict[str, str], log: Path, warm: str) -> None:
        self.rank = rank
        self.log = log
        self.stacks = log.with_suffix(".stacks.txt")
        self.replies, write_end = os.pipe()
        argv = [sys.executable, "-m", "stages.program", "--replies", str(write_end), "--stacks", str(self.stacks)]
        try:
            self.child = ChildProcess([*argv, "--warm", warm], env=env, log=log, reply_descriptor=write_end)
        except BaseException:
            os.close(self.replies)
            raise
        finally:
            os.close(write_end)
        self._buffer = b""

    def send(self, order: dict[str, str]) -> None:
        assert self.child.process.stdin is not None
        try:
            self.child.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.child.process.stdin.flush()
        except BrokenPipeError:
            raise self._lost() from None

    def read(self) -> list[dict[str, Any]]:
        """The whole lines that have arrived. Raises TransientError at end-of-file: the process is gone."""
        data = os.read(self.replies, 65536)
        if not data:
            raise self._lost()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def require_alive(self) -> None:
        """Raise TransientError if the process has ended and all it said is read.

        End-of-file alone does not tell: what the worker started may hold the pipe open.
        """
        if self.child.process.poll() is not None and not select.select([self.replies], [], [], 0)[0]:
            raise self._lost()

    def close(self) -> None:
        os.close(self.replies)

    def _lost(self) -> TransientError:
        self.child.kill()
        code = self.child.process.poll()
        how = "no exit code" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return TransientError(f"worker rank {self.rank} (pid {self.child.pid}) ended with {how}; log: {self.log}")


def _error(message: dict[str, Any], worker: _Worker) -> RatchetError:
    """The error that a stage reported, as the class it was raised with."""
    kind, text = message["error"], message["message"]
    if kind in _ARTIFACT_ERRORS:
        stage, fingerprint = message["artifact"]
        return _ARTIFACT_ERRORS[kind](text, stage=stage, fingerprint=fingerprint)
    if kind in _ERRORS:
        return _ERRORS[kind](text)
    return RatchetError(f"{text}; log: {worker.log}")
