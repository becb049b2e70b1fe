"""R19: kill -9 of the flow at random moments leaves no process, and what it left on the disk the next start removes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stages.rendezvous import Rendezvous, remove_stale
from tests.integration.pipelines import ROOT, TINY_GRPO, command, environment

TORTURE = os.environ.get("RATCHET_TORTURE") == "1"
MARK = "RATCHET_TEST_MARK"


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory instead of /tmp: it ends up in the names of sockets."""
    directory = Path(tempfile.mkdtemp(prefix="r19-"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    shutil.rmtree(directory)


def marked(mark: str) -> list[psutil.Process]:
    """Every process that descends from the flow with this mark, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def moments() -> list[tuple[str, float]]:
    """After which line of the run, and how many seconds more, each flow is killed."""
    generator = random.Random(19)
    if not TORTURE:
        return [("", 1.5), ("run ", generator.uniform(0.0, 1.0)), ("train_sft ", generator.uniform(0.0, 4.0))]
    lines = ["", "run ", "prepare_datasets ", "train_sft ", "before-generate_rollouts ", "round-000-update_policy "]
    return [(lines[trial % len(lines)], generator.uniform(0.0, 5.0)) for trial in range(50)]


def test_no_process_outlives_a_killed_flow(tmp_path: Path, prefect_home: Path, temporary: Path) -> None:
    slowest, ended, left, chosen = 0.0, [], 0, moments()
    for trial, (awaited, seconds) in enumerate(chosen):
        mark = uuid.uuid4().hex
        env = environment(prefect_home, **{MARK: mark, "TMPDIR": str(temporary)})
        argv = command(TINY_GRPO, tmp_path / f"store-{trial}")
        flow = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        assert flow.stdout is not None
        for line in flow.stdout if awaited else ():
            if line.startswith(awaited):
                break
        time.sleep(seconds)
        before = len(marked(mark))
        flow.kill()
        flow.communicate()
        killed = time.monotonic()
        while (alive := marked(mark)) and time.monotonic() - killed < 10.0:
            time.sleep(0.05)
        slowest = max(slowest, time.monotonic() - killed)
        assert alive == [], [process.cmdline() for process in alive]
        ended.append(before)
        left = max(left, len(list(temporary.glob("ratchet-rendezvous-*"))))
    assert max(ended) >= 7, "the flow, a server, a generator, a trainer, and a watcher for each"
    assert left >= 1
    remove_stale()
    assert list(temporary.glob("ratchet-rendezvous-*")) == []
    print(f"R19: {len(chosen)} flows killed with {ended} processes, all gone after {slowest:.1f} s at most")


def test_a_rendezvous_lasts_as_long_as_its_process(temporary: Path) -> None:
    mine = Rendezvous()
    theirs = subprocess.Popen(
        [sys.executable, "-c", "from stages.rendezvous import Rendezvous; r = Rendezvous(); print(r.path, flush=True);"
         " input()"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert theirs.stdout is not None
    other = Path(theirs.stdout.readline().strip())
    (temporary / "ratchet-rendezvous-file").write_text("not a directory")
    (temporary / "ratchet-rendezvous-link").symlink_to(ROOT)
    assert remove_stale() == 0 and mine.path.is_dir() and other.is_dir()
    assert oct(mine.path.stat().st_mode & 0o777) == "0o700"
    theirs.kill()
    theirs.wait()
    assert remove_stale() == 1 and not other.exists() and ROOT.is_dir()
    mine.close()
    mine.close()
    assert not mine.path.exists()
    theirs.communicate()
