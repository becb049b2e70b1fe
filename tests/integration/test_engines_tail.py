"""A batch that does not wait for its longest completions: cut by length alone, whatever ran beside what."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts.reference import ArtifactRef
from stages.workers import PoolSpec, WorkerPool
from tests.integration.stores import House

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
from pathlib import Path
from configs.resources import GeneratorResources
from stages.engines.vllm_engine import GenerationEngine, Request

engine = GenerationEngine(Path(sys.argv[1]), policy_version="a", dtype="float32", max_model_tokens=60, eos=1,
                          resources=GeneratorResources(threads=1, max_concurrent=int(sys.argv[2])))
honest, steps = engine._llm.llm_engine.step, []
engine._llm.llm_engine.step = lambda: steps.append(0) or honest()
batches = [[Request(f"{batch}/{i}", (3 + i % 5, 9, 2), 100 * batch + i) for i in range(12)] for batch in range(2)]

def sampled(batches, fraction):
    steps.clear()
    found = engine.sample(batches, temperature=1.5, max_completion_tokens=40, on_tokens=lambda finished: None,
                          finish_fraction=fraction)
    rows = {key: [one.token_ids, one.logprobs, one.finish_reason] for _, batch in found for key, one in batch.items()}
    return {"rows": rows, "steps": len(steps)}

print(json.dumps([sampled(batches, 1.0), sampled(batches, 0.25), sampled(batches[1:], 0.25), sampled(batches, 1.0)]))
"""


def by_the_rule(rows: dict[str, Any], *, fraction: float) -> dict[str, Any]:
    """What must be left of whole completions: each batch cut at its k-th shortest."""
    cut: dict[str, Any] = {}
    for batch in {key.partition("/")[0] for key in rows}:
        own = {key: row for key, row in rows.items() if key.startswith(f"{batch}/")}
        limit = sorted(len(tokens) for tokens, _, _ in own.values())[math.ceil(fraction * len(own)) - 1]
        for key, (tokens, logprobs, reason) in own.items():
            cut[key] = [tokens[:limit], logprobs[:limit], reason if len(tokens) <= limit else "length"]
    return cut


@pytest.mark.parametrize("max_concurrent", [64, 5])
def test_the_longest_are_cut_where_enough_have_ended(
    house: House, policy: ArtifactRef, tmp_path: Path, max_concurrent: int
) -> None:
    directory = policy.path(house.store) / "policy"
    env = WorkerPool(PoolSpec("generator", "cpu", 1, 1), logs=tmp_path)._environment(0, tmp_path / "rendezvous")
    argv = [sys.executable, "-c", PROGRAM, str(directory), str(max_concurrent)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300.0)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, cut, alone, again = json.loads(done.stdout.splitlines()[-1])
    lengths = sorted(len(tokens) for tokens, _, _ in whole["rows"].values())
    assert lengths[0] < lengths[-1], "else there is nothing to cut"
    expected = by_the_rule(whole["rows"], fraction=0.25)
    assert cut["rows"].keys() == expected.keys() and cut["steps"] < whole["steps"]
    assert alone["rows"].keys() == {key for key in expected if key.startswith("1/")}
    for found in (cut["rows"], alone["rows"]):
        for key, (tokens, logprobs, reason) in found.items():
            assert [tokens, reason] == [expected[key][0], expected[key][2]], key
            assert logprobs == pytest.approx(expected[key][1], abs=1e-5)
    assert again["rows"] == whole["rows"], "nothing that was stopped is left in the engine"
