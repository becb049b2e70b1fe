"""R23: a run that goes on with another number of trainer ranks, and says that it is not bit-identical."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest

from stages.artifacts import schemas
from stages.artifacts.shards import read_rows
from tests.integration.pipelines import ROOT, TINY_GRPO, Result, command, environment, run_flow

WAYS = [(2, 1, 2)]
if os.environ.get("RATCHET_TORTURE"):
    WAYS += [(1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (3, 1, 2), (1, 3, 1), (2, 3, 2), (3, 2, 1)]


def _words(ranks: int) -> list[str]:
    """A reward that even an untrained model gets some of, so that there is something to learn from."""
    rule = "rewards=[{kind: verifier, verifier: position_match}]"
    return [
        "--rounds",
        "3",
        "--set",
        "rounds.snapshot_every=1",
        "--set",
        rule,
        "--set",
        f"resources.trainer.ranks={ranks}",
    ]


def _until(line: str, store: Path, *more: str, home: Path) -> None:
    """Start the run and stop it once it has printed a line that begins with `line`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    flow = subprocess.Popen(command(TINY_GRPO, store, *more), cwd=ROOT, env=environment(home), text=True, **pipes)
    assert flow.stdout is not None
    assert any(said.startswith(line) for said in flow.stdout), f"ended before {line}"
    flow.send_signal(signal.SIGTERM)
    flow.stdout.read()
    assert flow.wait(timeout=60) == 143


def _losses(store: Path) -> list[float]:
    """policy_loss of every optimizer step of the run's rounds."""
    (run,) = (store / "runs").iterdir()
    losses = []
    for path in sorted((run / "jobs").glob("round-*-update_policy.json")):
        made = store / "artifacts" / "update_policy" / json.loads(path.read_text())["fingerprint"]
        rows = read_rows(made, "metrics", schemas.METRICS)
        losses += [row["value"] for row in rows if row["metric"] == "policy_loss"]
    return losses


@pytest.mark.parametrize("ranks", WAYS, ids=lambda way: "-".join(map(str, way)))
def test_a_run_goes_on_with_other_ranks_and_says_so(ranks: tuple[int, int, int], tmp_path: Path) -> None:
    store, home, started = tmp_path / "store", tmp_path / "home", time.monotonic()
    accept = ("--on-change", "keep")
    _until("round-000-update_policy", store, *_words(ranks[0]), home=home)
    if ranks[1] != ranks[0]:
        _refused(run_flow(TINY_GRPO, store, *_words(ranks[1]), home=home), was=ranks[0], now=ranks[1])
    _until("round-001-update_policy", store, *_words(ranks[1]), *accept, home=home)
    result = run_flow(TINY_GRPO, store, *_words(ranks[2]), *accept, home=home)
    assert result.code == 0, result.out + result.err
    assert {"train_sft", "round-000-update_policy", "round-001-update_policy"} <= set(result.reused())
    assert "round-002-update_policy" in result.made()
    changes = [f"resources.trainer.ranks {a} -> {b}" for a, b in pairwise(ranks) if a != b]
    assert f"not bit-identical: {'; '.join(changes)}" in result.out
    (run,) = (store / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["bit_reproducible"], summary["not_bit_identical"]) == (False, changes)
    losses = _losses(store)
    assert len(losses) == 12 and all(math.isfinite(loss) and 0.0 < abs(loss) < 0.5 for loss in losses), losses
    again = run_flow(TINY_GRPO, store, *_words(ranks[2]), home=home)
    assert (again.code, again.made()) == (0, []) and "not bit-identical" in again.out
    way = " -> ".join(map(str, ranks))
    print(f"R23: {way} ranks, 3 rounds finished, not bit-identical, {time.monotonic() - started:.0f} s")


def _refused(result: Result, *, was: int, now: int) -> None:
    assert result.code == 2 and result.out == "", result.out + result.err
    assert f"resources.trainer.ranks: was {was} when the run began, is {now} now" in result.err
