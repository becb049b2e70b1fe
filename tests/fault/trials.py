"""One start of a tiny run under a plan of death, as often as a campaign asks, in the nursery's forked processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from stages.artifacts import layout
from tests.fault.equality import litter
from tests.fault.hook import VARIABLE, Operation, Plan, deaths, operations, prepare
from tests.fault.nursery import ENVIRONMENT
from tests.integration.pipelines import ROOT, TINY_GRPO, TINY_PPO

TORTURE = os.environ.get("RATCHET_TORTURE") == "1"
START_SECONDS = 120.0


def trials(sample: int, *, full: int) -> int:
    """How many trials a test makes: the sample of `make test`, or the table's number in `make torture`."""
    return full if TORTURE else sample


@dataclass(frozen=True)
class Case:
    """A tiny pipeline: every stage of its algorithm, three rounds."""

    name: str
    config: Path
    overrides: Mapping[str, Any]


PPO = Case(
    "ppo",
    TINY_PPO,
    {
        "rounds.snapshot_every": 2,
        "sft.snapshot_every": 15,
        "reward_model.snapshot_every": 2,
        "retention.snapshots": 1,
    },
)
GRPO = Case(
    "grpo",
    TINY_GRPO,
    {
        # the exact match of an untrained model is always 0: nothing would be learned, and nothing proven
        "rewards": [{"kind": "verifier", "verifier": "position_match"}],
        "rounds.count": 3,
        "sampling.finish_fraction": 0.25,
        "rounds.snapshot_every": 5,
        "sft.snapshot_every": 4,
    },
)
CASES = {case.name: case for case in (PPO, GRPO)}


@dataclass(frozen=True)
class Ended:
    """How a start ended: exit code, or minus the signal. directory: what was recorded.

    deaths: the stages that were at work when the planned deaths came.
    """

    code: int
    seconds: float
    out: str
    directory: Path
    deaths: tuple[str, ...]

    def operations(self) -> list[Operation]:
        """The durable operations that it made, in order."""
        return operations(self.directory)


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbed."""

    case: Case
    store: Path
    operations: Sequence[Operation]
    seconds: float


class Nursery:
    """A process that has every library loaded and forks runs. Several can be under way at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.environment = {"RATCHET_KEY_FILE": str(directory / "key"), "TMPDIR": str(directory / "tmp")}
        (directory / "tmp").mkdir(exist_ok=True)
        self._starts = 0
        self._lock = threading.Lock()
        self._born: dict[int, Future[int]] = {}
        self._ends: dict[int, Future[Any]] = {}
        with (directory / "nursery.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fault.nursery"],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        if json.loads(self._process.stdout.readline() or "{}") != {"ready": True}:
            raise RuntimeError(f"the nursery did not start; log: {directory / 'nursery.log'}")
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30.0)

    def start(self, case: Case, store: Path, *plans: Plan, **more: Any) -> Started:
        """Start a run and return at once.

        more: `overrides`, `env`, `file_size` (the limit, in bytes), `take_over`, `cold` (new workers for every stage),
        `in_turn` (nothing is done at the same time).
        """
        with self._lock:
            self._starts += 1
            number = self._starts
            self._born[number] = Future()
        directory = self.directory / f"start-{number:05d}"
        prepare(directory, plans, store=store)
        order = {
            "id": number,
            "config": str(ROOT / case.config),
            "overrides": {**case.overrides, **more.pop("overrides", {}), "store": str(store)},
            "env": {VARIABLE: str(directory), **more.pop("env", {})},
            "fault": str(directory),
            "log": str(directory / "log"),
            **more,
        }
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        pid = self._born[number].result(timeout=30.0)
        return Started(pid=pid, directory=directory, _end=self._ends[pid])

    def run(self, case: Case, store: Path, *plans: Plan, **more: Any) -> Ended:
        """Start a run and wait for its end."""
        return self.start(case, store, *plans, **more).wait()

    def finish(self, case: Case, store: Path, **more: Any) -> Ended:
        """Run to the end undisturbed. Raises AssertionError with the log if that fails."""
        ended = self.run(case, store, **more)
        assert ended.code == 0, f"exit code {ended.code}\n{ended.out}"
        return ended

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "id" in message:
                self._ends[message["pid"]] = Future()
                self._born[message["id"]].set_result(message["pid"])
            else:
                self._ends[message["pid"]].set_result(message)


@dataclass(frozen=True)
class Started:
    """A run that is under way."""

    pid: int
    directory: Path
    _end: Future[Any] = field(repr=False)

    @property
    def out(self) -> str:
        """What it has said so far."""
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, *, seconds: float = START_SECONDS) -> Ended:
        """Wait for its end."""
        try:
            message = self._end.result(timeout=seconds)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"expected an end within {seconds} s: {self.directory}\n{self.out}") from None
        return Ended(
            code=message["code"],
            seconds=message["seconds"],
            out=self.out,
            directory=self.directory,
            deaths=tuple(deaths(self.directory)),
        )

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._end.done()

    def kill(self) -> Ended:
        """kill -9 the launcher, and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait_for(self, text: str, *, seconds: float = START_SECONDS) -> None:
        """Wait until it has said `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.out:
            assert time.monotonic() < deadline and not self._end.done(), f"expected {text!r} in\n{self.out}"
            time.sleep(0.02)


def undisturbed(nursery: Nursery, case: Case, store: Path) -> Reference:
    """Make the reference of a case."""
    ended = nursery.finish(case, store)
    assert litter(store) == []
    return Reference(case=case, store=store, operations=ended.operations(), seconds=ended.seconds)


def prefix(reference: Reference, store: Path, *, before: int) -> None:
    """A store with the artifacts that the reference had committed before its `before`-th operation (from 0)."""
    for operation in reference.operations[:before]:
        kind, _, where = operation.name.partition(" ")
        source = reference.store / where
        if kind == "rename" and where.startswith("artifacts/") and (source / layout.MANIFEST).exists():
            (store / where).parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, store / where, copy_function=os.link, dirs_exist_ok=True)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of the items, evenly over the sequence."""
    if count >= len(items):
        return list(items)
    return [items[int((index + 0.5) * len(items) / count)] for index in range(count)]


def rng(*words: object) -> random.Random:
    """Random numbers by coordinates."""
    return random.Random("/".join(map(str, words)))
