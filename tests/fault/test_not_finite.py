"""R12: NaN and Inf planted at random positions. The round stops before its next commit and names what it found."""

from __future__ import annotations

import importlib
import math
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import optimization
from stages.artifacts.errors import GateError
from stages.artifacts.store import ArtifactRef
from stages.estimate_advantages.job import EstimateAdvantages, Inputs, Parameters
from stages.job import Job
from stages.program import Context
from stages.update_policy.job import TrainerState
from tests.integration.stores import GRPO, PPO, House, Row, hashes, settings
from tests.unit.stage_artifacts import commit_rewards

Gate = Callable[[Job], str]
Tables = Mapping[str, list[Row]]
TORTURE = os.environ.get("RATCHET_TORTURE") == "1"
TRIALS = 40 if TORTURE else 20
VALUES = [math.nan, math.inf, -math.inf]
PLACES = [
    *(("advantages", name) for name in ("advantages", "returns")),
    *(("logprobs", name) for name in ("old_logprobs", "ref_logprobs", "values")),
]


@dataclass(frozen=True)
class Start:
    """What a round begins from."""

    policy: ArtifactRef
    critic: ArtifactRef


@pytest.fixture(scope="module")
def start(house: House) -> Start:
    policy = house.make(house.sft(tied=True, steps=1))
    return Start(policy, house.make(house.critic(house.make(house.reward_model(policy)))))


def test_a_policy_that_runs_away_stops_the_round(house: House, start: Start, gate: Gate) -> None:
    """A KL explosion: old logprobs that the policy never gave look like a policy far from its own start."""
    state, written = TrainerState(policy=start.policy), house.written_round(version=start.policy.fingerprint)
    for bound, stops in ((1e-4, True), (1e9, False)):
        algorithm = GRPO.model_copy(update={"max_kl_to_old": bound})
        said = gate(house.update(settings(algorithm), state, **written))
        assert ("round 0, optimizer step 0: expected at most 0.0001 nats per token" in said) is stops, said


def test_planted_numbers_stop_the_round_and_are_named(house: House, start: Start, gate: Gate) -> None:
    generator, state = random.Random(12), TrainerState(policy=start.policy, critic=start.critic)
    before = {ref: hashes(ref.path(house.store)) for ref in (start.policy, start.critic)}
    for trial in range(TRIALS):
        table, column = PLACES[trial % len(PLACES)]
        value = generator.choice(VALUES)
        planted: list[Row] = []

        place = (table, column, value)

        def plant(tables: Tables, place: tuple[str, str, float] = place, planted: list[Row] = planted) -> None:
            row = generator.choice(tables[place[0]])
            row[place[1]][generator.randrange(len(row[place[1]]))] = place[2]
            planted.append(row)

        written = house.written_round(version=start.policy.fingerprint, seed=trial, change=plant)
        job = house.update(settings(PPO), state, **written)
        said = gate(job)
        assert said == (
            f"rollout prompt_id {planted[0]['prompt_id']}, sample_index 0: expected finite {column}, found {value}; "
            "no optimizer step was made"
        )
        assert not job.ref.path(house.store).exists()
    assert before == {ref: hashes(ref.path(house.store)) for ref in before}
    print(f"R12: {TRIALS} of {TRIALS} planted numbers stopped their round by name, no artifact changed")


def test_a_reward_that_is_not_finite_stops_before_advantages(house: House, start: Start, gate: Gate) -> None:
    generator = random.Random(13)
    for value in VALUES:
        written = house.written_round(version=start.policy.fingerprint)
        rows = house.rows(written["rollouts"], "rollouts")
        sick = generator.choice(rows)
        rewards = [
            {
                "prompt_id": row["prompt_id"],
                "sample_index": 0,
                "source": "total",
                "reward": value if row is sick else 1.0,
            }
            for row in rows
        ]
        inputs = Inputs(
            rollouts=written["rollouts"],
            rewards=commit_rewards(house.store, rewards),
            logprobs=written["logprobs"],
            state=TrainerState(policy=start.policy),
        )
        job = EstimateAdvantages(store=house.store, seed=1, inputs=inputs, parameters=Parameters(algorithm=GRPO))
        said = gate(job)
        assert said == f"rollout prompt_id {sick['prompt_id']}, sample_index 0: expected finite reward, found {value}"


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("when", range(3 if not TORTURE else 20))
def test_a_loss_or_gradient_that_is_not_finite_names_step_and_prompts(
    one_rank: None, house: House, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, when: int
) -> None:
    """Planted in the loss of a random microbatch, after good steps; the attempt is left without a manifest."""
    algorithm = GRPO.model_copy(update={"num_minibatches": 2, "epochs": 2})
    state = TrainerState(policy=start.policy)
    written = house.written_round(version=start.policy.fingerprint)
    chosen = settings(algorithm, max_tokens_per_microbatch=40)
    job = house.update(chosen, state, **written)
    honest, seen = optimization._Step._policy_loss, []
    sick = random.Random(when).randrange(4, 8)

    def loss(self: Any, microbatch: Any) -> torch.Tensor:
        found = honest(self, microbatch)
        seen.append((self.trainer.optimizer_steps, [self.rows[i]["prompt_id"] for i in microbatch.rows]))
        if len(seen) != sick:
            return found
        return found * math.nan if kind == "loss" else found + (found * 0.0).abs().sqrt()

    monkeypatch.setattr(optimization._Step, "_policy_loss", loss)
    with pytest.raises(GateError) as caught:
        importlib.import_module("stages.update_policy.run").run(job, Context(out=tmp_path))
    said = str(caught.value)
    step, prompts = seen[sick - 1]
    assert said.startswith(f"round 0, optimizer step {step}, prompt_id "), said
    assert any(prompt in said for prompt in prompts), said
    if kind == "loss":
        assert f"prompt_id {', '.join(sorted(set(prompts)))}: loss of microbatch " in said
        assert "is nan; expected a finite number; every parameter is finite" in said
    else:
        assert "gradient norm is " in said and "expected a finite number" in said
    assert list(tmp_path.rglob("manifest.json")) == []
