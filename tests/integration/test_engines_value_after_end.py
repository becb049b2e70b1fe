"""The critic after the end, where TRL gives the reward: what is read there, and that its loss counts it once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from configs.algorithms import Ppo
from stages.artifacts.reference import ArtifactRef
from stages.compute_logprobs.job import ComputeLogprobs
from stages.update_policy.job import TrainerState
from tests.integration.stores import SLOW, House, Row, settings
from tests.integration.test_engines_deepspeed import SAME_STEP, largest_difference, weights

TRL = Ppo(convention="trl", policy_optimizer=SLOW, critic_optimizer=SLOW, num_minibatches=1, kl_coef=0.0)
LAST = TRL.model_copy(update={"reward_placement": "last_token"})


@pytest.fixture(scope="module")
def state(house: House) -> TrainerState:
    house.pools.of(house.sft(ranks=2)).start()
    policy = house.make(house.sft(steps=1))
    return TrainerState(policy=policy, critic=house.make(house.critic(house.make(house.reward_model(policy)))))


def one_token_more(tables: Mapping[str, list[Row]]) -> None:
    """Every completion goes on: the value before the new token is the one after the old end."""
    for row in tables["rollouts"]:
        row["completion_ids"] = [*row["completion_ids"], 7]
        row["rollout_logprobs"] = [*row["rollout_logprobs"], -5.0]


def values(house: House, state: TrainerState, algorithm: Ppo, rollouts: ArtifactRef) -> list[list[float]]:
    job = house.logprobs(settings(algorithm), state, rollouts=rollouts, reference=state.policy)
    wide = job.parameters.model_copy(update={"max_mismatch": 1e3})  # the rollouts were written by hand
    ref = house.make(ComputeLogprobs(**dict(job) | {"parameters": wide}))
    rows = sorted(house.rows(ref, "logprobs"), key=lambda row: (row["prompt_id"], row["sample_index"]))
    return [row["values"] for row in rows]


def test_the_value_after_the_end_is_the_one_before_a_further_token(house: House, state: TrainerState) -> None:
    version = state.policy.fingerprint
    rollouts = house.written_round(version=version)["rollouts"]
    longer = house.written_round(version=version, change=one_token_more)["rollouts"]
    found, plain = values(house, state, TRL, rollouts), values(house, state, LAST, rollouts)
    expected = values(house, state, LAST, longer)
    for mine, theirs, before in zip(found, expected, plain, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
        assert mine[:-1] == pytest.approx(before, abs=1e-5)


def test_the_critics_loss_counts_the_place_after_the_end_however_it_is_dealt(house: House, state: TrainerState) -> None:
    version = state.policy.fingerprint
    read = values(house, state, TRL, house.written_round(version=version)["rollouts"])

    def value_targets(tables: Mapping[str, list[Row]]) -> None:
        """Old values as the critic gives them; the longest completion has no place after its end."""
        order = sorted(range(len(read)), key=lambda i: tables["rollouts"][i]["prompt_id"])
        widest = max(len(row["completion_ids"]) for row in tables["rollouts"])
        for mine, index in zip(read, order, strict=True):
            tables["logprobs"][index]["values"] = mine
            credit, tokens = tables["advantages"][index], len(tables["rollouts"][index]["completion_ids"])
            count = min(tokens + 1, widest)
            credit["returns"] = [0.25 * t - 0.5 for t in range(count)]
            credit["token_rewards"] = [0.0] * count

    written = house.written_round(version=version, change=value_targets)
    whole = house.make(house.update(settings(TRL), state, **written))
    dealt = house.make(house.update(settings(TRL, ranks=2, max_tokens_per_microbatch=16), state, **written))
    assert largest_difference(weights(house, dealt), weights(house, whole)) < SAME_STEP
    widest = max(len(row) for row in read) - 1
    errors = [(v - (0.25 * t - 0.5)) ** 2 for row in read for t, v in enumerate(row[:widest])]
    expected = 0.5 * sum(errors) / len(errors)  # the first step: the critic still says what it said
    for made in (whole, dealt):
        metrics = house.manifest(made).metrics
        assert metrics["value_loss"] == pytest.approx(expected, rel=1e-4)
        assert metrics["value_clip_fraction"] == 0.0
    policy = {made: house.manifest(made).metrics["critic_grad_norm"] for made in (whole, dealt)}
    assert policy[whole] == pytest.approx(policy[dealt], rel=1e-4) and policy[whole] > 1e-3
