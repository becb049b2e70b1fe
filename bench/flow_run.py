"""Runs of our flow for the benches: `python -m flows.rlhf` by command line, Prefect and all, in scratch stores."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.result import ROOT
from bench.watched import Watched, run_watched

WAIT_POLICIES = ("PASSIVE", "ACTIVE")
"""How OpenMP's threads wait for each other: ours always PASSIVE (docs/adr/0007); alone on free cores ACTIVE may win."""

_KEPT = ("artifacts", "key_id", "digests.json")


@dataclass(frozen=True)
class FlowRun:
    """One configuration in a scratch directory of its own.

    overrides: KEY=VALUE, as the command line takes them. environment: variables besides the user's own.
    """

    config: str
    overrides: tuple[str, ...]
    scratch: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, store: Path, *words: str, overrides: Sequence[str] = ()) -> list[str]:
        """The command line that a person would type."""
        command = [sys.executable, "-m", "flows.rlhf", "--config", self.config]
        for override in (*self.overrides, *overrides, f"store={store}"):
            command += ["--set", override]
        return [*command, *words]

    def until_sft(self, store: Path) -> Path:
        """Make data and policy_0 once. Returns the store that holds them."""
        if not (store / "artifacts" / "train_sft").exists():
            self._run(self.command(store, "--until", "sft"), store)
        return store

    def from_policy_0(self, prepared: Path, store: Path, *, overrides: Sequence[str] = ()) -> Watched:
        """All rounds, in a new store that has data and policy_0 of `prepared` and nothing else."""
        if store.exists():
            raise SystemExit(f"{store}: expected no store there yet; choose another scratch directory or remove it")
        store.mkdir(parents=True)
        for name in _KEPT:
            source = prepared / name
            if source.is_dir():
                shutil.copytree(source, store / name)
            elif source.exists():
                shutil.copy2(source, store / name)
        return self._run(self.command(store, overrides=overrides), store)

    def in_store(self, store: Path, *, overrides: Sequence[str] = (), log: Path | None = None) -> Watched:
        """What is not done yet of a run, in a store that other runs may share."""
        return self._run(self.command(store, overrides=overrides), store, log=log)

    def _run(self, command: Sequence[str], store: Path, *, log: Path | None = None) -> Watched:
        store.parent.mkdir(parents=True, exist_ok=True)
        env = environment(self.scratch, self.environment)
        return run_watched(command, cwd=ROOT, env=env, log=log or store.with_name(f"{store.name}.log"))


def environment(scratch: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with everything that is remembered between runs kept inside `scratch`."""
    own = {
        "RATCHET_KEY_FILE": str(scratch / "key"),
        "PREFECT_HOME": str(scratch / "prefect"),
        "PREFECT_MEMO_STORE_PATH": str(scratch / "prefect" / "memo.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
    }
    return {**os.environ, **own, **(extra or {})}
