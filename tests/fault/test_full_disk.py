"""R07: no room to write, in whatever way. It says where and how much is free, keeps what it had, and goes on after."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from stages.artifacts import layout
from tests.fault.campaign import compared
from tests.fault.equality import manifests
from tests.fault.trials import Ended, Nursery, Reference, rng, trials

pytestmark = pytest.mark.timeout(0)
EX_INPUT = 2
EX_IOERR = 74
SEED = 7


@contextmanager
def small_disk(where: Path, options: str) -> Iterator[None]:
    """A tmpfs of its own at `where`; skips the test where mounting is not allowed."""
    where.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(where)], check=True)


def check_message(ended: Ended, store: Path) -> None:
    """Exit code and the one line that names path, free space and what to do; or the estimate refuses beforehand."""
    if ended.code == EX_INPUT:
        assert "free" in ended.out and ended.seconds < 5.0 and not list(store.glob("artifacts/*/*")), ended.out
        return
    assert ended.code == EX_IOERR, f"exit code {ended.code}\n{ended.out}"
    (line,) = [line for line in ended.out.splitlines() if line.startswith("error: ")]
    assert str(store) in line and "expected room" in line and "bytes and" in line and "same command again" in line, line
    assert "Traceback" not in ended.out


def grown(nursery: Nursery, reference: Reference, store: Path, remount: list[str]) -> list[str]:
    """What is wrong after the disk was full, and after there was room again."""
    ended = nursery.run(reference.case, store)
    check_message(ended, store)
    kept = manifests(store)
    subprocess.run(remount, check=True)
    again = nursery.finish(reference.case, store)
    assert len(re.findall(r"^[a-z0-9_-]+ +already done", again.out, re.MULTILINE)) == len(kept), again.out
    return compared(reference, store)


def test_r07_a_full_disk_is_named_and_what_was_done_is_kept(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    started, count, different = time.monotonic(), trials(3, full=30), []
    for number in range(count):
        reference, draw = list(references.values())[number % 2], rng(SEED, number)
        store = tmp_path / str(number) / "store"
        store.parent.mkdir()
        biggest = max(p.stat().st_size for p in reference.store.rglob("*") if p.is_file())
        if number % 3 == 0:
            ended = nursery.run(reference.case, store, file_size=draw.randrange(20_000, biggest))
            check_message(ended, store)
            nursery.finish(reference.case, store)
            different += compared(reference, store)
            continue
        disk = store.parent / "disk"
        used = int(subprocess.check_output(["du", "-s", "--block-size=1", str(reference.store)]).split()[0])
        files = sum(1 for _ in reference.store.rglob("*"))
        few = f"size={draw.randrange(used // 20, used)}"
        if number % 3 == 2:
            few = f"size=1g,nr_inodes={draw.randrange(files // 20, files)}"
        with small_disk(disk, few):
            remount = ["mount", "-o", "remount,size=1g,nr_inodes=100k", str(disk)]
            different += grown(nursery, reference, disk / "store", remount)
    print(
        f"R07: {count} of {count} full disks (file size limit, bytes, inodes) named with path and free space, "
        f"{count - len(different)} ended same after room was made; {time.monotonic() - started:.0f} s"
    )
    assert different == []


def test_r07_a_log_that_cannot_be_written_stops_nothing_silently(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    reference, store = references["grpo"], tmp_path / "store"
    (run,) = (reference.store / "runs").iterdir()
    logs = layout.run_directory(store, run.name) / "logs"
    logs.mkdir(parents=True)
    for worker in ("trainer-0", "generator-0"):
        (logs / f"{worker}.log").symlink_to("/dev/full")
    ended = nursery.run(reference.case, store)
    if ended.code != 0:
        check_message(ended, store)
    for path in logs.iterdir():
        path.unlink()
    nursery.finish(reference.case, store)
    print(f"R07: logs on /dev/full: exit code {ended.code}, then same")
    assert compared(reference, store) == []
