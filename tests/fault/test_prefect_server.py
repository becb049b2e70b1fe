"""R14: Prefect's server dies, hangs, comes back or cannot write in the middle of a run from the command line.

The run is done anyway.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.pipelines import ROOT, TINY_GRPO, Result, command, environment, run_flow

TORTURE = os.environ.get("RATCHET_TORTURE") == "1"
GOES_ON = "does not answer; the run goes on without its view"
LOCKED_SECONDS = 60.0 if TORTURE else 5.0
STAGES = 20  # at least, of tiny_grpo.yaml: two rounds


def killed(server: psutil.Process, home: Path) -> None:
    server.kill()


def stopped(server: psutil.Process, home: Path) -> None:
    server.suspend()


def back_later(server: psutil.Process, home: Path) -> None:
    """It hangs for two seconds, and goes on."""
    server.suspend()
    threading.Timer(2.0, lambda: server.is_running() and server.resume()).start()


def disk_full(server: psutil.Process, home: Path) -> None:
    """No file of the server's grows any more."""
    server.rlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def database_locked(server: psutil.Process, home: Path) -> None:
    """Somebody else holds the lock of its database for a while, or until the server ends."""

    def hold() -> None:
        database = sqlite3.connect(home / "prefect.db", isolation_level=None, timeout=30.0)
        database.execute("BEGIN IMMEDIATE")
        psutil.wait_procs([server], timeout=LOCKED_SECONDS)
        database.rollback()
        database.close()

    threading.Thread(target=hold, daemon=True).start()


@dataclass(frozen=True)
class Trial:
    """What befalls the server, after how many lines of stages and how many seconds more."""

    lines: int
    seconds: float
    fault: Callable[[psutil.Process, Path], None] = killed


def trials() -> dict[str, list[Trial]]:
    """By what befalls the server."""
    generator = random.Random(14)
    if not TORTURE:
        kills = [Trial(1, generator.uniform(0.0, 1.0)), Trial(5, generator.uniform(0.0, 0.1))]
        return {"killed": kills, "database_locked": [Trial(2, 0.0, database_locked)]}
    kills = [Trial(generator.randrange(STAGES), generator.uniform(0.0, 1.0)) for _ in range(20)]
    others = {
        kind.__name__: [Trial(generator.randrange(STAGES // 2), 0.0, kind) for _ in range(5)]
        for kind in (back_later, disk_full, database_locked)
    }
    return {"killed": kills, "stopped": [Trial(t.lines, t.seconds, stopped) for t in kills], **others}


def disturbed(store: Path, home: Path, trial: Trial, *more: str) -> tuple[Result, bool]:
    """A run whose server is hit; whether it was hit before the run ended."""
    argv = command(TINY_GRPO, store, *more)
    with open(store.with_suffix(".err"), "w+") as errors:
        flow = subprocess.Popen(argv, cwd=ROOT, env=environment(home), stdout=subprocess.PIPE, stderr=errors, text=True)
        assert flow.stdout is not None
        out, hit, seen = "", False, 0
        for line in flow.stdout:
            out += line
            seen += bool(Result(0, line, "").stage_lines())
            if seen >= trial.lines and not hit:
                time.sleep(trial.seconds)
                hit = True
                for child in psutil.Process(flow.pid).children():
                    if "uvicorn" in child.cmdline():
                        trial.fault(child, home)
        code = flow.wait(timeout=240.0)
        errors.seek(0)
        return Result(code, out, errors.read()), hit


def digest(result: Result) -> str:
    return result.out.rpartition("last policy's sha256: ")[2].split()[0]


@pytest.mark.parametrize("kind", trials())
def test_the_run_is_done_whenever_its_server_is(
    kind: str, tmp_path: Path, prefect_home: Path, tiny_store: Path
) -> None:
    """The same bits, each stage once, exit code 0, no traceback; and the next run needs nothing of the old database."""
    reference = run_flow(TINY_GRPO, tiny_store, home=prefect_home)
    expected, labels = digest(reference), sorted(reference.reused())
    slowest, chosen = 0.0, trials()[kind]
    for index, trial in enumerate(chosen):
        store, home = tmp_path / f"store-{index}", tmp_path / f"home-{index}"
        started = time.monotonic()
        result, hit = disturbed(store, home, trial)
        slowest = max(slowest, time.monotonic() - started)
        assert hit and result.code == 0, (trial, result.out, result.err)
        assert "Traceback" not in result.out + result.err and "EventsWorker" not in result.err, result.err
        assert sorted(result.made()) == labels, trial
        assert digest(result) == expected
        if trial.lines < STAGES - 5 and trial.fault in (killed, stopped):
            assert GOES_ON in result.out, trial
        shutil.rmtree(home)
        if index == 0 and kind == "killed":
            again = run_flow(TINY_GRPO, store, "--rounds", "3", home=tmp_path / "another-home")
            assert again.code == 0, again.out + again.err
            assert all(label.startswith(("round-002", "after-002")) for label in again.made()), again.made()
        shutil.rmtree(store)
    done = f"{len(chosen)} of {len(chosen)} runs done, the slowest in {slowest:.1f} s"
    print(f"R14, Prefect's server {kind.replace('_', ' ')}: {done}")
