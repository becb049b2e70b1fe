"""Every policy loss through the real update: the same step however it is cut and dealt, and what does not count.

Bounds as in test_engines_deepspeed.py: 2e-6 is a hundredth of one step's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from configs.algorithms import Algorithm, Cispo, Dapo, DrGrpo, Gspo, Mismatch, Rloo
from configs.models import Optimizer
from stages.artifacts.reference import ArtifactRef
from stages.update_policy.job import TrainerState
from tests.integration.stores import House, Row, settings
from tests.integration.test_engines_deepspeed import SAME_STEP, largest_difference, weights

USUAL: dict[str, Any] = {"policy_optimizer": Optimizer(learning_rate=2e-4), "num_minibatches": 2}
METHODS: list[Algorithm] = [
    Gspo(**USUAL, truncated="mask", clip_low=0.2, clip_high=0.2),
    Cispo(**USUAL, mismatch=Mismatch(level="sequence", form="mask", high=3.0)),
    DrGrpo(**USUAL, max_completion_tokens=9, mismatch=Mismatch(), dual_clip=3.0),
    Rloo(**USUAL, loss="reinforce", aggregation="sequence_sum", kl_placement="loss", kl_estimator="k2"),
]


def disturb(tables: Mapping[str, list[Row]]) -> None:
    """Every third completion was cut, and the generator saw other probabilities than the trainer."""
    for index, row in enumerate(tables["rollouts"]):
        row["finish_reason"] = "length" if index % 3 == 0 else "stop"
        row["rollout_logprobs"] = [x + 0.1 * ((index + t) % 5 - 2) for t, x in enumerate(row["rollout_logprobs"])]


@pytest.fixture(scope="module")
def policy(house: House) -> ArtifactRef:
    house.pools.of(house.sft(ranks=2)).start()
    return house.make(house.sft(steps=1))


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda algorithm: algorithm.name)
def test_the_same_step_for_one_and_for_many_microbatches(
    house: House, policy: ArtifactRef, algorithm: Algorithm
) -> None:
    state, written = TrainerState(policy=policy), house.written_round(version=policy.fingerprint, change=disturb)
    whole = house.make(house.update(settings(algorithm), state, **written))
    dealt = house.make(house.update(settings(algorithm, ranks=2, max_tokens_per_microbatch=16), state, **written))
    assert largest_difference(weights(house, dealt), weights(house, whole)) < SAME_STEP
    assert largest_difference(weights(house, policy), weights(house, whole)) > 1e-4  # it did learn
    said, theirs = house.manifest(whole).metrics, house.manifest(dealt).metrics
    for metric in ("policy_loss", "policy_grad_norm", "mismatch_kl", "mismatch_gap", "mismatch_weight"):
        assert theirs[metric] == pytest.approx(said[metric], rel=1e-4, abs=1e-6), metric
    assert 0.1 < said["mismatch_gap"] < 0.14 and said["mismatch_kl"] > 0  # gaps of 0, 0.1 and 0.2


def test_completions_that_were_cut_can_be_left_out(house: House, policy: ArtifactRef) -> None:
    """Whatever their advantages are, the step is the same."""

    def exaggerate(tables: Mapping[str, list[Row]]) -> None:
        disturb(tables)
        for row, credit in zip(tables["rollouts"], tables["advantages"], strict=True):
            if row["finish_reason"] == "length":
                credit["advantages"] = [100.0 * x for x in credit["advantages"]]

    state, chosen = TrainerState(policy=policy), settings(Dapo(**USUAL, truncated="mask"))
    plain, loud = (
        house.make(house.update(chosen, state, **house.written_round(version=policy.fingerprint, change=change)))
        for change in (disturb, exaggerate)
    )
    assert largest_difference(weights(house, plain), weights(house, loud)) == 0.0
