"""Leases: one owner, named; free when it is dead; fenced off when it was taken over from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.artifacts import store
from stages.artifacts.errors import LeaseHeld
from stages.artifacts.lease import Lease
from tests.unit.toys import Toy


@pytest.fixture
def job(tmp_path: Path) -> Toy:
    return Toy(store=tmp_path, seed=1)


def test_a_held_lease_names_its_owner(tmp_path: Path) -> None:
    with Lease(tmp_path / "lock", what="artifact toy/1"):
        with pytest.raises(LeaseHeld) as caught, Lease(tmp_path / "lock", what="artifact toy/1"):
            pass
        message = str(caught.value)
        assert message.startswith("artifact toy/1 is held by ") and f"pid {os.getpid()} on " in message
        assert " since 20" in message and caught.value.exit_code == 5
    with Lease(tmp_path / "lock", what="artifact toy/1"):
        pass


HOLD = """
import sys, time
from pathlib import Path
from stages.artifacts.lease import Lease
from stages.artifacts.manifest import Manifest
from stages.artifacts.reference import ArtifactRef
with Lease(Path(sys.argv[1]), what="it"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_lease_of_a_dead_owner_is_free_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(LeaseHeld, match=f"pid {holder.pid} on "), Lease(tmp_path / "lock", what="it"):
        pass
    holder.kill()
    holder.wait()
    with Lease(tmp_path / "lock", what="it"):
        assert f'"pid": {os.getpid()}' in (tmp_path / "lock").read_text()


LEAVE_A_CHILD = """
import os, sys, time
from pathlib import Path
from stages.artifacts.lease import Lease
with Lease(Path(sys.argv[1]), what="it"):
    if os.fork() == 0:
        os.close(1)
        time.sleep(float(sys.argv[2]))
    else:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("seconds", "is_free"), [(0.3, True), (4.0, False)])
def test_a_dead_owner_is_waited_for_while_what_it_was_starting_holds_its_lock(
    tmp_path: Path, seconds: float, is_free: bool
) -> None:
    command = [sys.executable, "-c", LEAVE_A_CHILD, str(tmp_path / "lock"), str(seconds)]
    owner = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    assert owner.wait() == -signal.SIGKILL
    if is_free:
        with Lease(tmp_path / "lock", what="it"):
            assert f'"pid": {os.getpid()}' in (tmp_path / "lock").read_text()
    else:
        with pytest.raises(LeaseHeld, match=f"pid {owner.pid} on "), Lease(tmp_path / "lock", what="it"):
            pass


def test_a_lease_that_was_taken_over_commits_nothing_more(job: Toy, tmp_path: Path) -> None:
    """The paused owner, seen from inside: it holds its flock still, and finds at the commit that it is fenced off."""
    attempt = store.new_attempt(job)
    (attempt / "rows").write_bytes(b"rows")
    with Lease(tmp_path / "lock", what="run r") as old:
        old.require()
        with Lease(tmp_path / "lock", what="run r", take_over=True) as new:
            assert new.fenced is not None and new.fenced.pid == os.getpid()
            new.require()
            with pytest.raises(LeaseHeld, match="run r was taken over by pid"):
                store.commit(job, attempt, metrics={}, wall_seconds=0.0, leases=[old])
            assert store.verify(job.store, job.ref) is None
            with pytest.raises(LeaseHeld, match="held by"), Lease(tmp_path / "lock", what="run r"):
                pass
            store.commit(job, attempt, metrics={}, wall_seconds=0.0, leases=[new])
        with pytest.raises(LeaseHeld, match="commits nothing more"):
            old.require()
    assert json.loads((tmp_path / "lock").read_text())["number"] == 2
    with Lease(tmp_path / "lock", what="run r") as third:
        third.require()
    assert json.loads((tmp_path / "lock").read_text())["number"] == 3


def test_a_stopped_owner_is_taken_over_from_and_wakes_up_fenced(tmp_path: Path) -> None:
    script = HOLD.replace('what="it"):', 'what="it") as it:')
    script = script.replace("time.sleep(60)", "sys.stdin.readline()\n    it.require()")
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    owner.send_signal(signal.SIGSTOP)
    with pytest.raises(LeaseHeld, match=f"pid {owner.pid} on .* --take-over"), Lease(tmp_path / "lock", what="it"):
        pass
    with Lease(tmp_path / "lock", what="it", take_over=True):
        owner.send_signal(signal.SIGCONT)
        _, said = owner.communicate("go on\n", timeout=20)
    assert owner.returncode == 1
    assert f"it was taken over by pid {os.getpid()}" in said
