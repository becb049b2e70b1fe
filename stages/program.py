"""What every stage program shares: parse the job, seed, open inputs, report progress; run once, or serve jobs.

Knows no stage by name: the job says which one. Loads torch only after the job or the worker kind is known.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import ValidationError

from configs.secrets import RedactedStream, redact
from stages import turns
from stages.artifacts import layout, store
from stages.artifacts.durable import read_json
from stages.artifacts.errors import DamagedArtifact, InputError, RatchetError
from stages.artifacts.lease import Lease
from stages.artifacts.manifest import write_manifest
from stages.artifacts.private import keep_files_private
from stages.artifacts.room import room_for
from stages.artifacts.seeds import seed_at, seed_libraries
from stages.job import Job
from stages.rollout_shards import RolloutShard
from stages.stacks import write_stacks_on_signal
from stages.workers import PoolSpec, WorkerPool

if TYPE_CHECKING:
    from stages.decoding import Decoding
    from stages.limits import Limits

Metrics = dict[str, float]
_STAGES = Path(__file__).resolve().parent


@dataclass
class Context:
    """What a program gets besides its job.

    out: the attempt's directory, where it writes. live: objects that stay in memory between jobs, keyed by the
    fingerprint of the state they hold. takes_turns: whether they must leave the device between jobs. rank, world_size:
    of this process among those that run the job. shard: the only one of its rollouts to work on, or None: all. tokens,
    wasted_tokens, flops: what models computed for it. decoding: what was sampled for it. start_seconds:
    spent in starting().
    """

    out: Path
    live: dict[Any, Any] = field(default_factory=dict)
    takes_turns: bool = False
    rank: int = 0
    world_size: int = 1
    shard: RolloutShard | None = None
    report: Callable[[str, int, int], None] = lambda what, done, total: None
    tokens: int = 0
    wasted_tokens: int = 0
    flops: float = 0.0
    decoding: Decoding | None = None
    start_seconds: float = 0.0

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While an engine or a model that stays is made, loaded or woken: the ledger's start, not its work."""
        began = time.monotonic()
        yield
        self.start_seconds += time.monotonic() - began

    def progress(self, what: str, done: int, total: int) -> None:
        """Say that `done` of `total` units of work are finished: what the watchdog and the person both watch."""
        self.report(what, done, total)

    def count(self, tokens: int, wasted: int, flops: float) -> None:
        """Say what models compute for this job, on all ranks: tokens, those of them that are padding, operations."""
        self.tokens += tokens
        self.wasted_tokens += wasted
        self.flops += flops

    def take_count(self) -> Metrics:
        """What was counted so far; from here on it is counted anew."""
        taken = {"tokens": float(self.tokens), "wasted_tokens": float(self.wasted_tokens), "flops": self.flops}
        self.tokens, self.wasted_tokens, self.flops = 0, 0, 0.0
        return taken

    def add_count(self, taken: Metrics) -> None:
        """Count what take_count() gave, here or in an earlier attempt at the same job."""
        self.count(int(taken["tokens"]), int(taken["wasted_tokens"]), taken["flops"])

    def least_seconds(self, limits: Limits, *, ranks: int) -> float:
        """The least time in which as many devices with these limits could have done what this one knows of."""
        decoded = self.decoding.least_seconds(limits) if self.decoding is not None else 0.0
        return decoded + self.flops / (limits.flops_per_second * ranks)

    def work(self) -> Metrics:
        """What was counted, as metrics; nothing where no model computed."""
        if not self.tokens:
            return {}
        return {
            "computed_tokens": float(self.tokens),
            "padding_fraction": self.wasted_tokens / self.tokens,
            "model_flops": self.flops,
        }


def load_job(path: Path) -> Job:
    """Read a job.json as the job class of its stage. Raises InputError; imports nothing that it names but a stage."""
    try:
        document = read_json(path)
        stage, version = document.pop("stage"), document.pop("version")
        fingerprint = document.pop("fingerprint")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: expected a job.json written by a flow, found {error!r}") from None
    if not (isinstance(stage, str) and stage.isidentifier() and (_STAGES / stage / "job.py").is_file()):
        raise InputError(f"{path}: expected the name of a stage, found {stage!r:.80}; run the flow again")
    module = importlib.import_module(f"stages.{stage}.job")
    job_class = next(
        c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Job) and vars(c).get("STAGE") == stage
    )
    if version != job_class.VERSION:
        raise InputError(f"{path}: expected {stage} version {job_class.VERSION}, found {version}; run the flow again")
    try:
        job = job_class.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
    if job.fingerprint != fingerprint:
        raise InputError(f"{path}: expected fingerprint {job.fingerprint}, found {fingerprint}; was it edited?")
    return job


def execute(job: Job, context: Context) -> Metrics:
    """Run one job in this process, seeded by its coordinates and on its threads. Returns its metrics."""
    program = importlib.import_module(f"stages.{job.STAGE}.run")
    if job.compute.device == "cuda" or "torch" in sys.modules:
        import torch

        torch.set_num_threads(job.compute.threads)  # the job before may have had another number
    seed_libraries(seed_at(job.seed, job.STAGE))
    metrics: Metrics = program.run(job, context)
    return metrics | context.work()


def serve(replies: TextIO, *, warm: str, takes_turns: bool = False) -> None:
    """Serve jobs until the control pipe closes: a resident worker.

    Control lines: {"job": path, "out": path}, with "shard" to do that of it and no more; or {"rest": true}: leave the
    device until the next job. Reply lines: {"progress": [what, done, total]}, then one {"done": metrics, "least":
    seconds that the work takes at least by the device's measured limits, 0 before they are measured, "start":
    seconds in which engines and models were made} or {"error": kind, "message": text, ...}.
    """
    rank = int(os.environ.get("RATCHET_ENGINE", os.environ.get("RANK", "0")))
    world_size = int(os.environ.get("RATCHET_ENGINES", os.environ.get("WORLD_SIZE", "1")))
    live: dict[Any, Any] = {}
    at_rest = False
    limits: Limits | None = None

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    for name in filter(None, warm.split(",")):
        importlib.import_module(name)
    gc.freeze()  # the libraries' objects stay for good; vLLM alone collects over all of them five times as it starts
    reply({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("rest"):
            if not at_rest:
                turns.rest(live)
            at_rest = True
            reply({"rested": True})
            continue
        context = Context(
            out=Path(order["out"]),
            live=live,
            takes_turns=takes_turns,
            rank=rank,
            world_size=world_size,
            shard=RolloutShard.ordered(order["shard"]) if "shard" in order else None,
            report=lambda what, done, total: reply({"progress": [what, done, total]}),
        )
        try:
            if at_rest:
                with context.starting():
                    turns.resume(live)
                at_rest = False
            with room_for(context.out):
                job = load_job(Path(order["job"]))
                metrics = execute(job, context)
            least = context.least_seconds(limits, ranks=job.compute.ranks) if limits is not None else 0.0
            reply({"done": metrics, "least": least, "start": context.start_seconds})
            if limits is None and (context.flops or context.decoding is not None):
                from stages.limits import limits_if_there_is_room

                limits = limits_if_there_is_room(on_gpu=job.compute.device == "cuda")
        except DamagedArtifact as error:
            artifact = [error.stage, error.fingerprint]
            reply({"error": error.kind, "message": redact(str(error)), "artifact": artifact})
        except RatchetError as error:
            reply({"error": error.kind, "message": redact(str(error))})
        except Exception as error:
            traceback.print_exc()
            reply({"error": "fatal", "message": redact(f"{type(error).__name__}: {error}")})
            break


def main(stage: str) -> None:
    """`python -m stages.<stage>.run job.json [--out DIR]`: make one artifact by hand.

    Without --out it is committed to the job's store. With --out the result goes to that directory and, if the
    artifact is committed, is compared with it file by file.
    """
    parser = argparse.ArgumentParser(prog=f"python -m stages.{stage}.run", description=main.__doc__)
    parser.add_argument("job", type=Path, help="the job.json that the flow wrote, under <store>/runs/<run>/jobs/")
    parser.add_argument("--out", type=Path, help="run again into this new directory and compare")
    arguments = parser.parse_args()
    keep_files_private()
    try:
        sys.exit(_by_hand(stage, arguments.job, arguments.out))
    except RatchetError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)


def _by_hand(stage: str, path: Path, out: Path | None) -> int:
    job = load_job(path)
    if stage != job.STAGE:
        raise InputError(f"{path}: expected a job of {stage}, found one of {job.STAGE}")
    done = store.verify(job.store, job.ref)
    if done is not None and out is None:
        print(f"{job.ref} is already done: {job.ref.path(job.store)}")
        print("to run it again elsewhere and compare: add --out DIR")
        return 0
    if out is not None and out.exists() and any(out.iterdir()):
        raise InputError(f"--out {out}: expected a new or empty directory")
    if out is None:
        with Lease(layout.lock(job.store, job.STAGE, job.fingerprint), what=f"artifact {job.ref}") as lease:
            attempt = store.new_attempt(job)
            metrics, seconds = _run_in_workers(job, path, attempt)
            store.commit(job, attempt, metrics=metrics, wall_seconds=seconds, leases=[lease])
        print(f"{job.ref} done in {seconds:.1f} s: {job.ref.path(job.store)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    metrics, seconds = _run_in_workers(job, path, out)
    made = write_manifest(job, out, metrics=metrics, wall_seconds=seconds)
    print(f"{job.ref} run again in {seconds:.1f} s: {out / layout.MANIFEST}")
    if done is None:
        return 0
    different = sorted(n for n in made.files.keys() | done.files if made.files.get(n) != done.files.get(n))
    print(f"{len(made.files) - len(different)} of {len(made.files)} files are the same bits as the committed ones")
    for name in different:
        print(f"differs: {name}")
    return 1 if different else 0


def _run_in_workers(job: Job, path: Path, attempt: Path) -> tuple[Metrics, float]:
    """Metrics and wall seconds of one run of the job in workers of its own."""
    started = time.monotonic()
    with WorkerPool(PoolSpec.of(job), logs=path.parent.parent / "logs") as pool:
        metrics = pool.run(path.resolve(), attempt.resolve(), on_progress=_print_progress)
    return metrics, time.monotonic() - started


def _print_progress(what: str, done: int, total: int) -> None:
    print(f"{what}: {done} of {total}", flush=True)


def _worker() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.program")
    parser.add_argument("--replies", type=int, required=True, help="file descriptor for reply lines")
    parser.add_argument("--stacks", type=Path, required=True, help="file for stacks, written on SIGUSR1")
    parser.add_argument("--warm", default="", help="modules to import before the first job")
    parser.add_argument("--takes-turns", action="store_true", help="leave the device between jobs when told to")
    arguments = parser.parse_args()
    keep_files_private()
    write_stacks_on_signal(arguments.stacks)
    sys.stdout, sys.stderr = RedactedStream(1), RedactedStream(2)
    with os.fdopen(arguments.replies, "w") as replies:
        serve(replies, warm=arguments.warm, takes_turns=arguments.takes_turns)


if __name__ == "__main__":
    _worker()
