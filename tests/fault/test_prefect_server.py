"""R14: Prefect's server is killed, or hangs, in the middle of a run from the command line. The run is done anyway."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.integration.pipelines import ROOT, TINY_GRPO, Result, command, environment, run_flow

TORTURE = os.environ.get("RATCHET_TORTURE") == "1"
GOES_ON = "does not answer; the run goes on without its view"
STAGES = 20  # at least, of tiny_grpo.yaml: two rounds


@dataclass(frozen=True)
class Trial:
    """When the server is hit, after how many lines of stages and how many seconds more, and how."""

    lines: int
    seconds: float
    number: signal.Signals = signal.SIGKILL


def trials() -> list[Trial]:
    generator = random.Random(14)
    if not TORTURE:
        return [Trial(1, generator.uniform(0.0, 1.0)), Trial(5, generator.uniform(0.0, 0.1))]
    kills = [Trial(generator.randrange(STAGES), generator.uniform(0.0, 1.0)) for _ in range(20)]
    return kills + [Trial(t.lines, t.seconds, signal.SIGSTOP) for t in kills]


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
                        child.send_signal(trial.number)
        code = flow.wait(timeout=120.0)
        errors.seek(0)
        return Result(code, out, errors.read()), hit


def digest(result: Result) -> str:
    return result.out.rpartition("last policy's sha256: ")[2].split()[0]


def test_the_run_is_done_whenever_its_server_dies(tmp_path: Path, prefect_home: Path, tiny_store: Path) -> None:
    """The same bits, each stage once, exit code 0, no traceback; and the next run needs nothing of the old database."""
    reference = run_flow(TINY_GRPO, tiny_store, home=prefect_home)
    expected, labels = digest(reference), sorted(reference.reused())
    slowest, chosen = 0.0, trials()
    for index, trial in enumerate(chosen):
        store, home = tmp_path / f"store-{index}", tmp_path / f"home-{index}"
        started = time.monotonic()
        result, hit = disturbed(store, home, trial)
        slowest = max(slowest, time.monotonic() - started)
        assert hit and result.code == 0, (trial, result.out, result.err)
        assert "Traceback" not in result.out + result.err and "EventsWorker" not in result.err, result.err
        assert sorted(result.made()) == labels, trial
        assert digest(result) == expected
        if trial.lines < STAGES - 5:
            assert GOES_ON in result.out, trial
        shutil.rmtree(home)
        if index == 0:
            again = run_flow(TINY_GRPO, store, "--rounds", "3", home=tmp_path / "another-home")
            assert again.code == 0, again.out + again.err
            assert all(label.startswith(("round-002", "after-002")) for label in again.made()), again.made()
        shutil.rmtree(store)
    print(f"R14: {len(chosen)} of {len(chosen)} runs done without Prefect's server, the slowest in {slowest:.1f} s")
