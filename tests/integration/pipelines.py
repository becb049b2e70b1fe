"""Running the flow as a user does, from the command line, and reading what it left."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_STAGE_LINE = re.compile(r"^(\S+)\s+(already done|[\d.]+ s)(?:\s|$)")
TINY_PPO = Path("tests/integration/tiny_ppo.yaml")
TINY_GRPO = Path("tests/integration/tiny_grpo.yaml")


@dataclass(frozen=True)
class Result:
    """One run of the command."""

    code: int
    out: str
    err: str

    def stage_lines(self) -> dict[str, str]:
        """`already done`, or the seconds, of each stage by label."""
        found = (_STAGE_LINE.match(line) for line in self.out.splitlines())
        return {match[1]: match[2] for match in found if match}

    def made(self) -> list[str]:
        """Labels of the stages that ran."""
        return [label for label, line in self.stage_lines().items() if line != "already done"]

    def reused(self) -> list[str]:
        """Labels of the stages that were done already."""
        return [label for label, line in self.stage_lines().items() if line == "already done"]


def environment(home: Path, **extra: str) -> dict[str, str]:
    """A Prefect home of its own, so that no test sees another's server state."""
    prefect = {"PREFECT_HOME": str(home), "PREFECT_MEMO_STORE_PATH": str(home / "memo.toml")}
    return {**os.environ, **prefect, **extra}


def heed_interrupts() -> None:
    """For a child about to start: SIGINT ends it, also where these tests run in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(config: Path, store: Path, *more: str) -> list[str]:
    """The command line of the flow."""
    return [sys.executable, "-m", "flows.rlhf", "--config", str(config), "--set", f"store={store}", *more]


def run_flow(config: Path, store: Path, *more: str, home: Path, **extra: str) -> Result:
    """Run the flow to its end."""
    done = subprocess.run(
        command(config, store, *more),
        cwd=ROOT,
        env=environment(home, **extra),
        capture_output=True,
        text=True,
        timeout=500,
    )
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)
