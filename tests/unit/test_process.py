"""Child processes: nothing runs before somebody watches over it, nothing outlives its parent, ends are final."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from stages.process import _GATE, ChildProcess
from stages.stacks import family
from tests.unit.test_workers import is_alive, wait_until

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = [sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"]


def child(tmp_path: Path, argv: list[str]) -> ChildProcess:
    return ChildProcess(argv, env=os.environ, log=tmp_path / "log")


def test_a_child_that_nobody_watches_never_starts(tmp_path: Path) -> None:
    """Its parent died between starting it and starting its watcher: the line that opens the gate does not come."""
    witness = tmp_path / "started"
    done = subprocess.run([*_GATE, "touch", str(witness)], stdin=subprocess.DEVNULL, timeout=10.0, check=False)
    assert done.returncode == 0 and not witness.exists()
    done = subprocess.run([*_GATE, "touch", str(witness)], input=b"\n", timeout=10.0, check=False)
    assert done.returncode == 0 and witness.exists()


def test_the_gate_takes_its_line_and_nothing_else(tmp_path: Path) -> None:
    words = child(tmp_path, ["cat"])
    assert words.process.stdin is not None
    words.process.stdin.write(b"first order\nsecond order\n")
    words.process.stdin.close()
    assert words.process.wait(timeout=10.0) == 0
    words.kill()
    assert (tmp_path / "log").read_text() == "first order\nsecond order\n"


def test_kill_takes_the_group_and_is_final(tmp_path: Path) -> None:
    parent = child(tmp_path, SLEEPER)
    assert wait_until(lambda: len(family(parent.pid)) == 2)
    pids = family(parent.pid)
    descriptors = psutil.Process().num_fds()
    parent.kill()
    parent.kill()
    parent.close(grace_seconds=0.1)
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert psutil.Process().num_fds() == descriptors - 2, "the lifeline and the control pipe"


def test_a_child_that_cannot_be_started_leaves_no_descriptor(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    missing = child(tmp_path, [str(tmp_path / "no such program")])
    assert missing.process.wait(timeout=10.0) == 127
    missing.kill()
    assert psutil.Process().num_fds() == before
    assert "not found" in (tmp_path / "log").read_text()
