"""R01, R05: the command as a user types it, elsewhere and interrupted. It ends with the bits of the reference."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from stages.artifacts import layout, schemas
from stages.artifacts.shards import read_table
from tests.fault.campaign import compared
from tests.fault.hook import VARIABLE, Plan, deaths, prepare
from tests.fault.trials import Case, Nursery, Reference, rng, trials
from tests.integration.pipelines import ROOT, environment, heed_interrupts

pytestmark = pytest.mark.timeout(0)
SEED = 5
GRACE_SECONDS = 10.0


def typed(
    case: Case, store: Path, nursery: Nursery, *, home: Path, cwd: Path = ROOT, log: Path, **extra: str
) -> subprocess.Popen[bytes]:
    """The real command, with Prefect and with workers of its own."""
    argv = [sys.executable, "-m", "flows.rlhf", "--config", str(ROOT / case.config), "--set", f"store={store}"]
    for key, value in case.overrides.items():
        argv += ["--set", f"{key}={json.dumps(value)}"]
    env = environment(home, **nursery.environment, **extra)
    paths = [extra.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, cwd=cwd, env=env, stdout=output, stderr=output, start_new_session=True, preexec_fn=heed_interrupts
        )


def test_only_what_is_trained_on_is_cut_where_enough_has_ended(references: Mapping[str, Reference]) -> None:
    """All of the grpo case's trials run so: sampling.finish_fraction 0.25."""
    reference = references["grpo"]
    (run,) = (reference.store / "runs").iterdir()
    jobs = [json.loads(path.read_text()) for path in (run / "jobs").glob("*generate_rollouts.json")]
    fractions = {(job["parameters"]["purpose"], job["parameters"]["finish_fraction"]) for job in jobs}
    assert fractions == {("training", 0.25), ("evaluation", 1.0)}
    early = []
    for job in (job for job in jobs if job["parameters"]["purpose"] == "training"):
        directory = layout.artifact(reference.store, job["stage"], job["fingerprint"])
        for shard in directory.glob("rollouts-*.arrow"):
            rows = read_table(shard, schemas.ROLLOUTS, columns=["completion_ids", "finish_reason"]).to_pylist()
            longest = max(len(row["completion_ids"]) for row in rows)
            cut = [row for row in rows if row["finish_reason"] == "length"]
            assert all(len(row["completion_ids"]) == longest for row in cut), "all at the same length"
            early += cut if longest < job["parameters"]["max_completion_tokens"] else []
    assert early, "else nothing was cut, and nothing is shown"


def test_r01_elsewhere_it_ends_with_the_same_bits(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    started, count, different = time.monotonic(), trials(1, full=5), []
    for number in range(count):
        reference, draw = references[("grpo", "ppo")[number % 2]], rng(SEED, "R01", number)
        elsewhere, log = tmp_path / f"{number}" / "a directory with spaces", tmp_path / f"log-{number}"
        elsewhere.mkdir(parents=True)
        process = typed(
            reference.case,
            elsewhere / "store",
            nursery,
            home=tmp_path / "prefect",
            cwd=elsewhere,
            log=log,
            LC_ALL=draw.choice(("C", "POSIX", "C.UTF-8")),
            TZ=draw.choice(("Asia/Kathmandu", "America/St_Johns", "Pacific/Kiritimati")),
            PYTHONHASHSEED=str(draw.randrange(2**32)),
            OMP_NUM_THREADS=str(draw.randrange(1, 9)),
            COLUMNS="40",
        )
        assert process.wait(timeout=300.0) == 0, log.read_text()
        different += compared(reference, elsewhere / "store")
    print(
        f"R01: {count} runs in another directory, working directory, locale, time zone, with another hash seed and "
        f"thread setting, {'all same' if not different else 'not same'}; {time.monotonic() - started:.0f} s"
    )
    assert different == []


def test_with_new_workers_for_every_stage_it_ends_with_the_same_bits(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    """Each trainer stage begins with the newest snapshot and redo, each generation with a new engine."""
    started, different, starts = time.monotonic(), [], 0
    for reference in list(references.values())[: trials(1, full=2)]:
        store = tmp_path / reference.case.name
        done = nursery.finish(reference.case, store, cold=True)
        different += compared(reference, store)
        starts += done.out.count(" ready after ")
    print(
        f"cold equals warm: workers started {starts} times, {'all same' if not different else 'not same'}; "
        f"{time.monotonic() - started:.0f} s"
    )
    assert different == [] and starts > 30


def test_with_workers_that_take_turns_on_their_devices_it_ends_with_the_same_bits(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    """Whichever of trainer and generator is not at work has left; the generator takes its weights anew each turn."""
    for reference in references.values():
        nursery.finish(reference.case, tmp_path / reference.case.name, overrides={"resources.take_turns": True})
        different = compared(reference, tmp_path / reference.case.name)
        assert [line for line in different if "document config.json" not in line] == []


def test_r03_in_processes_of_their_own_it_is_the_same(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    started, count, different = time.monotonic(), trials(1, full=10), []
    for number in range(count):
        reference, draw = references[("ppo", "grpo")[number % 2]], rng(SEED, "R03", number)
        worker_made = [o for o in reference.operations if o.by == "worker"]
        plan = Plan(draw.choice(worker_made[: len(worker_made) // 2]).name)
        store, log, fault = tmp_path / str(number), tmp_path / f"log-{number}", tmp_path / f"fault-{number}"
        prepare(fault, [plan], store=store)
        more = {VARIABLE: str(fault), "PYTHONPATH": str(Path(__file__).with_name("site"))}
        process = typed(reference.case, store, nursery, home=tmp_path / "prefect", log=log, **more)
        assert process.wait(timeout=300.0) == -signal.SIGKILL, log.read_text()
        assert deaths(fault)
        nursery.finish(reference.case, store)
        different += compared(reference, store)
    print(
        f"R03: {count} of {count} typed commands died before a worker's operation and went on, "
        f"{'all same' if not different else 'not same'}; {time.monotonic() - started:.0f} s"
    )
    assert different == []


def interrupted(process: subprocess.Popen[bytes], log: Path, number: int, *, twice: bool, draw: random.Random) -> float:
    """Send the signal at a random moment. Returns the seconds until the end, or -1 if it had ended before."""
    time.sleep(draw.uniform(1.5, 16.0))
    if process.poll() is not None:
        return -1.0
    sent = time.monotonic()
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    if twice:
        time.sleep(draw.uniform(0.0, 0.5))
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
    try:
        process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(
            f"expected an end within {GRACE_SECONDS} s of signal {number}\n{log.read_text()}"
        ) from None
    return time.monotonic() - sent


def test_r05_a_signal_ends_it_in_seconds_and_the_same_command_goes_on(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    started, slowest, heard = time.monotonic(), 0.0, 0
    different: list[str] = []
    count = trials(2, full=40)
    for number in range(count):
        reference, draw = list(references.values())[number % 2], rng(SEED, "R05", number)
        store, log = tmp_path / str(number), tmp_path / f"log-{number}"
        kind = (signal.SIGINT, signal.SIGTERM)[number % 2]
        twice = kind == signal.SIGINT and number % 4 == 0
        process = typed(reference.case, store, nursery, home=tmp_path / "prefect", log=log)
        seconds = interrupted(process, log, kind, twice=twice, draw=draw)
        if seconds >= 0.0:
            heard, slowest = heard + 1, max(slowest, seconds)
            at_once = twice or not log.read_text()  # Python was still starting; a shell shows the same code for both
            assert process.returncode == 128 + kind or (at_once and process.returncode == -kind), log.read_text()
            assert "Traceback" not in log.read_text() or twice, log.read_text()
        else:
            assert process.returncode == 0, log.read_text()
        nursery.finish(reference.case, store)
        different += compared(reference, store)
    print(
        f"R05: {heard} of {count} runs interrupted by SIGINT or SIGTERM, slowest end {slowest:.1f} s, "
        f"{'all resumed same' if not different else 'not same'}; {time.monotonic() - started:.0f} s"
    )
    assert different == []
