"""R02, R03, R04: kill -9 at a random moment, before a durable operation, and in a storm. It ends with the same bits."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fault.campaign import Aim, Chain, aim_at_intervals, aim_at_operations, aim_at_random, aim_at_stages, chain
from tests.fault.trials import GRPO, Nursery, Reference, rng, trials

pytestmark = pytest.mark.timeout(0)
SEED = 3
MOST_CHAINS = 80


def chains(
    nursery: Nursery,
    references: Mapping[str, Reference],
    home: Path,
    aim: Callable[[str], Aim],
    *,
    deaths: int,
    in_each_stage: int = 0,
) -> list[Chain]:
    """Chains of both cases at the same time, each in a new store, until there were so many deaths per case.

    Stages that were hit too seldom until then are aimed at alone.
    """

    def one(name: str) -> list[Chain]:
        done: list[Chain] = []
        stages = {o.stage for o in references[name].operations if o.name.startswith("mkdir attempts/")}
        hits: Counter[str] = Counter()
        while len(done) < MOST_CHAINS and (
            hits.total() < deaths or min(hits[stage] for stage in stages) < in_each_stage
        ):
            store, at = home / f"{name}-{len(done)}", f"{name}/{len(done)}"
            left = max(12, min(deaths - hits.total(), 30))
            lacking = {stage for stage in stages if hits[stage] < in_each_stage}
            aimed = aim(at) if hits.total() < deaths else aim_at_stages(rng(SEED, "stages", at), lacking)
            done.append(chain(nursery, references[name], store, aimed, deaths=left, before=Counter(hits)))
            hits += done[-1].hits
            if not done[-1].different:
                shutil.rmtree(store)
        return done

    with ThreadPoolExecutor(len(references)) as threads:
        return [chain for chains in threads.map(one, references) for chain in chains]


def figures(test: str, what: str, done: list[Chain], seconds: float) -> str:
    """The line that a test prints."""
    same = sum(not c.different for c in done)
    stages = ", ".join(f"{stage} {n}" for stage, n in sorted(sum((c.hits for c in done), Counter()).items()))
    return (
        f"{test}: {sum(c.deaths for c in done)} {what} in {len(done)} runs, {same} of {len(done)} runs same; "
        f"{seconds:.0f} s; while at work on: {stages}"
    )


def test_r02_killed_at_random_moments_it_ends_with_the_same_bits(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    started = time.monotonic()
    done = chains(
        nursery,
        references,
        tmp_path,
        lambda name: aim_at_random(rng(SEED, "R02", name)),
        deaths=trials(11, full=100),
        in_each_stage=trials(0, full=25),
    )
    print(figures("R02", "kills at random moments", done, time.monotonic() - started))
    assert [line for c in done for line in c.different] == []
    assert sum(c.deaths for c in done) >= trials(22, full=200)


def test_r03_killed_before_a_durable_operation_it_ends_with_the_same_bits(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    started = time.monotonic()
    done = chains(nursery, references, tmp_path, lambda name: aim_at_operations(rng(SEED, "R03", name)), deaths=22)
    print(figures("R03", "deaths before a durable operation", done, time.monotonic() - started))
    assert [line for c in done for line in c.different] == []
    assert sum(c.deaths for c in done) >= 40


def test_r04_in_a_storm_of_kills_it_ends_with_the_same_bits(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    started, done = time.monotonic(), []
    for number in range(trials(1, full=20)):
        reference = list(references.values())[number % len(references)]
        aim = aim_at_intervals(
            rng(SEED, "R04", number), shortest=0.1 * reference.seconds, longest=0.8 * reference.seconds
        )
        done.append(chain(nursery, reference, tmp_path / str(number), aim, deaths=100))
    lost, made = sum(c.lost_stages() for c in done), sum(c.made_stages() for c in done)
    line = figures(
        "R04", "kills, each after 0.1 to 0.8 of an undisturbed run's time,", done, time.monotonic() - started
    )
    print(f"{line}; {lost} of {made} stages begun again, {100 * lost / made:.0f} %")
    assert [line for c in done for line in c.different] == []
    assert lost <= 0.2 * made or len(done) < 20, "what was finished is never begun again"


def test_a_lock_that_a_killed_compiler_left_holds_nobody_up(nursery: Nursery, tmp_path: Path) -> None:
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")))
    shutil.copytree(built, tmp_path / "extensions")
    (tmp_path / "extensions" / "deepspeed_shm_comm" / "lock").touch()
    started = nursery.start(GRPO, tmp_path / "store", env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")})
    started.wait_for("train_sft   ", seconds=60.0)
    started.kill()
