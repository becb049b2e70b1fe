"""R16: configurations that cannot work are refused with exit code 2, one line a fault, before anything starts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.contract.test_configs import SMALL, write
from tests.fault.bad_configs import ALL, VALUES, Bad
from tests.integration.pipelines import ROOT, TINY_GRPO, environment

TORTURE = bool(os.environ.get("RATCHET_TORTURE"))
FROM_THE_COMMAND_LINE = len(ALL) if TORTURE else 6


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def _arguments(case: Bad, directory: Path) -> tuple[Path, list[str]]:
    """The configuration file and the words after it."""
    directory.mkdir()
    case.prepare(directory)
    config = directory / "bad.yaml"
    if case.text is not None:
        config.write_bytes(case.text if isinstance(case.text, bytes) else case.text.encode())
    elif case in VALUES:
        write(config, SMALL | {"store": str(directory / "store")})
    else:
        write(config, {"extends": str(ROOT / TINY_GRPO), "store": str(directory / "store")})
    return config, [word for o in case.overrides for word in ("--set", o.replace("{dir}", str(directory)))]


def _check(case: Bad, code: int, out: str, err: str) -> None:
    lines = err.splitlines()
    assert code == 2, (case.name, code, out, err)
    assert out == "" and "Traceback" not in err, (case.name, out, err)
    assert len(lines) == case.lines and all(line.startswith("error: ") for line in lines), (case.name, lines)
    assert all(len(line) < 700 for line in lines), (case.name, lines)
    assert all(word in err for word in case.words), (case.name, case.words, lines)


def test_every_bad_configuration_is_refused_in_one_line_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.rlhf import main

    monkeypatch.chdir(ROOT)
    before, slowest = psutil.Process().children(recursive=True), 0.0
    for number, case in enumerate(ALL):
        config, more = _arguments(case, tmp_path / str(number))
        started = time.monotonic()
        code = main(["--config", str(config), *more])
        slowest = max(slowest, time.monotonic() - started)
        _check(case, code, *capsys.readouterr())
        assert psutil.Process().children(recursive=True) == before, "nothing was started"
        assert not list(tmp_path.glob("*/store/runs")), "no run was begun"
    with capsys.disabled():
        print(f"\nR16: {len(ALL)} of {len(ALL)} bad configurations refused, slowest {slowest:.2f} s")
    assert len(ALL) >= 60 and slowest < 10.0


def test_a_sample_from_the_command_line(tmp_path: Path) -> None:
    chosen = random.Random(16).sample(ALL, FROM_THE_COMMAND_LINE)
    slowest, home = 0.0, tmp_path / "home"
    for number, case in enumerate(chosen):
        config, more = _arguments(case, tmp_path / str(number))
        command = [sys.executable, "-m", "flows.rlhf", "--config", str(config), *more]
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=60)
        slowest = max(slowest, time.monotonic() - started)
        _check(case, done.returncode, done.stdout, done.stderr)
    print(f"R16: {len(chosen)} of {len(chosen)} refused from the command line, slowest {slowest:.1f} s")
    assert slowest < 10.0
