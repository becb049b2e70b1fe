"""What dies, and when: a hook before every durable operation, in every process of a run. Told by the environment.

`RATCHET_FAULT` names a directory with `plans.json`. There each process signs `processes`, each operation adds a line
to `operations`, and the i-th planned death leaves `death-i`. Production code knows nothing of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from stages.artifacts import durable

VARIABLE = "RATCHET_FAULT"
Victim = Literal["launcher", "worker", "everyone"]
_ATTEMPT = re.compile(r"attempts/([a-z_]+)/[0-9a-f]+/#")
_VARIES = (
    (re.compile(r"(attempts/[a-z_]+/[0-9a-f]+)/\d+"), r"\1/#"),
    (re.compile(r"\.\d+\.tmp$"), ".#.tmp"),
    (re.compile(r"^(quarantine/[a-z_]+/[0-9a-f]+)-\d+"), r"\1-#"),
)


@dataclass(frozen=True)
class Plan:
    """One death of a start, which may have several.

    operation: the name of a durable operation (see `name_of`), or "any". nth: which one of that name in the
    process that makes it. seconds: how long after it; with 0 death comes before it is made. victim: who dies; a
    worker that is to die is the one that makes the operation, or every one that is up.
    """

    operation: str
    nth: int = 1
    seconds: float = 0.0
    victim: Victim = "everyone"


def name_of(kind: str, path: Path, *, store: Path) -> str:
    """An operation, the same in each start of a run: without the store's place, attempt numbers and process ids."""
    where = os.path.relpath(path, store)
    for pattern, name in _VARIES:
        where = pattern.sub(name, where)
    return f"{kind} {where}"


class Hook:
    """The hook of this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        told = json.loads((directory / "plans.json").read_text())
        self.store = Path(told["store"])
        self.plans = [Plan(**plan) for plan in told["plans"]]
        self._seen = [0] * len(self.plans)
        self._stage = "no stage"

    def install(self) -> None:
        """Be told of every durable operation of this process from now on."""
        durable.before_operation = self

    def __call__(self, kind: str, path: Path) -> None:
        """One operation is about to be made."""
        name = name_of(kind, path, store=self.store)
        append(self.directory / "operations", f"{os.getpid()}\t{time.monotonic():.3f}\t{name}\n")
        if attempt := _ATTEMPT.search(name):
            self._stage = attempt[1]
        for index, plan in enumerate(self.plans):
            if plan.operation not in (name, "any"):
                continue
            self._seen[index] += 1
            if self._seen[index] == plan.nth and plan.seconds == 0.0:
                self._die(index)
            elif self._seen[index] == plan.nth:
                threading.Thread(target=self._die_later, args=(index,), daemon=True).start()

    def _die_later(self, index: int) -> None:
        time.sleep(self.plans[index].seconds)
        self._die(index)

    def _die(self, index: int) -> None:
        """Once per plan, whichever process and whichever attempt gets there first."""
        try:
            descriptor = os.open(self.directory / f"death-{index}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return
        os.write(descriptor, self._stage.encode())
        os.close(descriptor)
        up = [process for process in signed_in(self.directory) if process.is_up()]
        launchers = [process.pid for process in up if process.kind == "launcher"]
        workers = [process.pid for process in up if process.kind == "worker"]
        match self.plans[index].victim:
            case "launcher":
                victims = launchers
            case "worker":
                victims = [os.getpid()] if os.getpid() in workers else workers
            case "everyone":
                victims = [*launchers, *workers]
        for pid in sorted(victims, key=lambda pid: pid == os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def append(path: Path, text: str) -> None:
    """Add a line that other processes may be adding to as well."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class SignedIn:
    """A process of a start. born: when it began, so that another one with the same id is not taken for it."""

    pid: int
    kind: Literal["launcher", "worker"]
    born: str

    def is_up(self) -> bool:
        """Whether it still exists."""
        return _born(self.pid) == self.born


def _born(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def signed_in(directory: Path) -> list[SignedIn]:
    """The processes of a start."""
    rows = (line.split("\t") for line in (directory / "processes").read_text().splitlines())
    return [SignedIn(int(pid), "launcher" if kind == "launcher" else "worker", born) for pid, kind, born in rows]


def sign_in(directory: Path, kind: Literal["launcher", "worker"]) -> None:
    """Write this process down as one of the run's, and install its hook."""
    append(directory / "processes", f"{os.getpid()}\t{kind}\t{_born(os.getpid())}\n")
    Hook(directory).install()


def sign_in_by_environment() -> None:
    """Called by sitecustomize in every Python process; those of a run under test sign in."""
    words = getattr(sys, "orig_argv", [])
    if directory := os.environ.get(VARIABLE):
        if "stages.program" in words:
            sign_in(Path(directory), "worker")
        elif "flows.rlhf" in words:
            sign_in(Path(directory), "launcher")


def prepare(directory: Path, plans: Sequence[Plan], *, store: Path) -> None:
    """A fresh directory for one start under `plans`."""
    directory.mkdir(parents=True)
    told = {"store": str(store), "plans": [asdict(plan) for plan in plans]}
    (directory / "plans.json").write_text(json.dumps(told))


@dataclass(frozen=True)
class Operation:
    """One durable operation as it was recorded. by: who made it. at: seconds on the machine's monotonic clock."""

    by: Literal["launcher", "worker"]
    at: float
    name: str

    @property
    def kind(self) -> str:
        """write, fsync, rename, ..."""
        return self.name.partition(" ")[0]

    @property
    def stage(self) -> str:
        """The stage whose artifact it concerns, or the part of the store."""
        where = self.name.partition(" ")[2].split("/")
        return where[1] if where[0] in ("attempts", "artifacts", "quarantine") and len(where) > 1 else where[0]


def operations(directory: Path) -> list[Operation]:
    """The operations of one start, in order."""
    if not (directory / "operations").exists():
        return []
    signed = {process.pid: process.kind for process in signed_in(directory)}
    rows = (line.split("\t") for line in (directory / "operations").read_text().splitlines())
    return [Operation(signed[int(pid)], float(at), name) for pid, at, name in rows]


def deaths(directory: Path) -> list[str]:
    """The stages that were at work when the planned deaths came."""
    return [path.read_text() for path in sorted(directory.glob("death-*"))]
