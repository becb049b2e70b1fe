"""R21: many rounds in one run: memory, descriptors and disk do not grow."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault.hook import signed_in
from tests.fault.trials import GRPO, Nursery, Started, trials

pytestmark = pytest.mark.timeout(0)
ROUND = re.compile(r"^round-(\d+)-generate_rollouts", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    round_index: int
    rss: int
    descriptors: int


def sampled(started: Started) -> dict[int, list[Sample]]:
    """Samples of every process of a run until it ends, by process id."""
    samples: dict[int, list[Sample]] = defaultdict(list)
    while not started.is_over:
        rounds = ROUND.findall(started.out)
        for process in signed_in(started.directory) if (started.directory / "processes").exists() else []:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
            except (FileNotFoundError, ProcessLookupError):
                continue
            rss = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
            if rounds and rss:
                samples[process.pid].append(Sample(int(rounds[-1]), int(rss[1]), descriptors))
        time.sleep(0.2)
    return samples


def test_r21_memory_descriptors_and_disk_stay_what_they_were(nursery: Nursery, tmp_path: Path) -> None:
    count = trials(12, full=200)
    settled = 20 if count > 20 else 4
    overrides = {
        "rounds.count": count,
        "rounds.prompts_per_round": 2,
        "rounds.group_size": 2,
        "rounds.prompts_per_shard": 2,
        "rounds.snapshot_every": 10,
        "algorithm.num_minibatches": 1,
        "sampling.max_completion_tokens": 2,
        "evaluation.every": count,
        "retention": {"snapshots": 2, "policies": 2},
    }
    begun = time.monotonic()
    started = nursery.start(GRPO, tmp_path / "store", overrides=overrides)
    samples = sampled(started)
    ended = started.wait()
    assert ended.code == 0, ended.out
    growth, more = 0.0, 0
    for rows in samples.values():
        early = [s for s in rows if settled <= s.round_index < settled + max(3, count // 20)]
        late = [s for s in rows if s.round_index >= count - max(3, count // 20)]
        if early and late:
            growth = max(growth, max(s.rss for s in late) / max(s.rss for s in early) - 1.0)
            # A leak stays; a file that happens to be open at one sample does not.
            more = max(more, min(s.descriptors for s in late) - max(s.descriptors for s in early))
    kept = len(list((tmp_path / "store" / "artifacts" / "update_policy").glob("*/policy")))
    states = len(list((tmp_path / "store" / "artifacts" / "snapshot_trainer").glob("*/trainer")))
    print(
        f"R21: {count} rounds, memory grew by at most {100 * growth:.1f} %, descriptors by {more}; {kept} policies and "
        f"{states} trainer states kept; {time.monotonic() - begun:.0f} s"
    )
    assert more <= 0
    assert states <= 2 and kept <= 2 + 1 + 10, "the newest, the best, and those that a redo is checked against"
    assert growth < 0.05 or count < 100
