"""A job runs on as many threads as its recipe says, whatever ran in the process before: bits can depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.evaluate_policy.job import EvaluatePolicy, Inputs, Parameters
from stages.job import Compute
from stages.program import Context, execute
from tests.unit.stage_artifacts import commit_rewards, commit_rollouts, rollout


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_job_has_its_own_number_of_threads(tmp_path: Path) -> None:
    reward = {"prompt_id": "p", "sample_index": 0, "source": "total", "reward": 1.0}
    inputs = Inputs(rollouts=commit_rollouts(tmp_path, [rollout("p", 0)]), rewards=commit_rewards(tmp_path, [reward]))
    found = []
    for threads in (2, 1, 3):
        compute = Compute(threads=threads)
        job = EvaluatePolicy(store=tmp_path, seed=1, compute=compute, inputs=inputs, parameters=Parameters(samples=1))
        execute(job, Context(out=tmp_path))
        found.append(torch.get_num_threads())
    assert found == [2, 1, 3]
