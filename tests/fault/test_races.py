"""R15: several processes on one run. One goes on, the others say who holds it; who was taken over commits nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fault.campaign import compared
from tests.fault.equality import manifests
from tests.fault.trials import Nursery, Reference, trials

pytestmark = pytest.mark.timeout(0)
EX_HELD = 5
SECONDS = 5.0


def test_r15_of_several_at_once_exactly_one_goes_on(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    begun, count, slowest = time.monotonic(), trials(10, full=100), 0.0
    for number in range(count):
        reference = list(references.values())[number % 2]
        store = tmp_path / str(number)
        several = [nursery.start(reference.case, store) for _ in range(2 + number % 3)]
        born = time.monotonic()
        while sum(started.is_over for started in several) < len(several) - 1:
            assert time.monotonic() - born < SECONDS, [started.out for started in several]
            time.sleep(0.01)
        slowest = max(slowest, time.monotonic() - born)
        (owner,) = [started for started in several if not started.is_over]
        for loser in (started for started in several if started is not owner):
            end = loser.wait()
            assert end.code == EX_HELD, end.out
            (line,) = [line for line in end.out.splitlines() if line.startswith("error: ")]
            assert re.search(rf"held by .*{owner.pid}\b", line) and socket.gethostname() in line, line
            assert re.search(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", line), line
        if number == 0:
            assert owner.wait().code == 0
            assert compared(reference, store) == []
        else:
            owner.kill()
            assert nursery.start(reference.case, store).kill().code == -9, "no stale lease needs a person"
    print(f"R15: {count} races, one winner each, slowest refusal {slowest:.1f} s; {time.monotonic() - begun:.0f} s")


def test_r15_a_stopped_owner_that_wakes_after_a_take_over_commits_nothing(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    begun, count = time.monotonic(), trials(2, full=20)
    for number in range(count):
        reference = list(references.values())[number % 2]
        store = tmp_path / str(number)
        old = nursery.start(reference.case, store)
        old.wait_for(("prepare_datasets  ", "train_sft  ", "round-000-score_rollouts  ")[number % 3])
        os.kill(old.pid, signal.SIGSTOP)
        refused = nursery.run(reference.case, store)
        assert refused.code == EX_HELD and "--take-over" in refused.out, refused.out
        new = nursery.start(reference.case, store, take_over=True)
        new.wait_for("taken over from ")
        if number % 2:
            new.wait_for("train_reward_model  " if reference.case.name == "ppo" else "before-score_rollouts  ")
        else:
            assert new.wait().code == 0, new.out
        made = set(manifests(store))
        os.kill(old.pid, signal.SIGCONT)
        woken = old.wait(seconds=60.0)
        assert woken.code == EX_HELD and "was taken over by" in woken.out, woken.out
        assert made <= set(manifests(store))
        assert new.wait().code == 0, new.out
        assert compared(reference, store) == []
    print(
        f"R15: {count} of {count} stopped owners found themselves taken over and committed nothing; "
        f"{time.monotonic() - begun:.0f} s"
    )
