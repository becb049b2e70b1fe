"""Dynamic sampling on real vLLM and DeepSpeed: what is trained on has a signal, and a kill changes no bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import layout, schemas
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.shards import read_rows
from tests.integration.pipelines import ROOT, TINY_GRPO, Result, command, environment, run_flow

MOST = 3
DYNAMIC = (
    *("--set", "rewards=[{kind: verifier, verifier: position_match}]"),
    *("--set", f"rounds.dynamic_sampling={{max_batches: {MOST}, min_spread: 0.3}}"),
)


@dataclass(frozen=True)
class Finished:
    """A run with dynamic sampling that nothing disturbed."""

    store: Path
    result: Result

    @property
    def directory(self) -> Path:
        said = re.search(r"^run (\S+): ", self.result.out, re.MULTILINE)
        assert said is not None
        return layout.run_directory(self.store, said[1])

    def job(self, label: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(layout.run_job(self.directory, label).read_text())
        return found

    def of(self, label: str) -> Path:
        """The artifact of a stage."""
        job = self.job(label)
        return layout.artifact(self.store, job["stage"], job["fingerprint"])

    def selections(self, round_index: int) -> list[str]:
        """The labels of a round's selections, in order."""
        labels = [f"round-{round_index:03d}-select_rollouts"]
        labels += [f"round-{round_index:03d}-refill-{batch}-select_rollouts" for batch in range(1, MOST)]
        return [label for label in labels if layout.run_job(self.directory, label).exists()]


@pytest.fixture(scope="module")
def after_sft(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds data, the policy after SFT and its evaluation."""
    store = tmp_path_factory.mktemp("dynamic") / "start"
    for stage in ("prepare_datasets", "train_sft", "evaluate_policy"):
        shutil.copytree(tiny_store / "artifacts" / stage, store / "artifacts" / stage)
    return store


@pytest.fixture(scope="module")
def finished(after_sft: Path, prefect_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    store = tmp_path_factory.mktemp("dynamic-whole") / "store"
    shutil.copytree(after_sft, store)
    result = run_flow(TINY_GRPO, store, *DYNAMIC, home=prefect_home)
    assert result.code == 0, result.out + result.err
    return Finished(store, result)


def test_what_is_trained_on_has_a_signal_and_no_prompt_comes_twice(finished: Finished) -> None:
    rows = json.loads((finished.directory / "summary.json").read_text())["rounds"]
    for index in range(2):
        label = f"round-{index:03d}"
        last = finished.selections(index)[-1]
        chosen = ArtifactRef(stage="select_rollouts", fingerprint=finished.job(last)["fingerprint"]).model_dump()
        for stage in ("compute_logprobs", "estimate_advantages", "update_policy"):
            assert finished.job(f"{label}-{stage}")["inputs"]["rollouts"] == chosen
        assert finished.job(f"{label}-estimate_advantages")["inputs"]["rewards"] == chosen
        totals = defaultdict(list)
        for row in read_rows(finished.of(last), "rewards", schemas.REWARDS):
            if row["source"] == "total":
                totals[row["prompt_id"]].append(row["reward"])
        trained = read_rows(finished.of(f"{label}-estimate_advantages"), "advantages", schemas.ADVANTAGES)
        assert {row["prompt_id"] for row in trained} == totals.keys() and len(totals) == 8
        assert all(len(rewards) == 4 and max(rewards) - min(rewards) > 0.3 for rewards in totals.values())
        groups = read_rows(finished.of(last), "groups", schemas.GROUPS)
        assert len({row["prompt_id"] for row in groups}) == len(groups) == 8 * len(finished.selections(index))
        dropped = [row for row in groups if row["fate"] == "no_signal"]
        assert dropped and all(row["highest"] - row["lowest"] <= 0.3 for row in dropped)
        assert rows[index + 1]["dropped"] == len(dropped) / len(groups)
        assert rows[index + 1]["batches"] == len(finished.selections(index)) > 1


def test_killed_between_a_refill_and_its_scoring_it_ends_in_the_same_bits(
    finished: Finished, after_sft: Path, prefect_home: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(after_sft, store)
    flow = subprocess.Popen(
        command(TINY_GRPO, store, *DYNAMIC), cwd=ROOT, env=environment(prefect_home), stdout=subprocess.PIPE, text=True
    )
    assert flow.stdout is not None
    for line in flow.stdout:
        if line.startswith("round-000-refill-1-generate_rollouts"):
            break
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    again = run_flow(TINY_GRPO, store, *DYNAMIC, home=prefect_home)
    assert again.code == 0, again.out + again.err
    assert "round-000-refill-1-generate_rollouts" in again.reused(), "no committed batch is sampled again"

    def hashes(root: Path) -> dict[str, str]:
        manifests = [json.loads(p.read_text()) for p in (root / "artifacts").glob("*/*/manifest.json")]
        return {f"{m['stage']}/{m['fingerprint']}/{n}": e["sha256"] for m in manifests for n, e in m["files"].items()}

    assert hashes(store) == hashes(finished.store)
