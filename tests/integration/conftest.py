"""Two models that several files of engine tests start from."""

from __future__ import annotations

import pytest

from stages.artifacts.reference import ArtifactRef
from tests.integration.stores import House


@pytest.fixture(scope="module")
def policy(house: House) -> ArtifactRef:
    return house.make(house.sft(tied=True, steps=1))


@pytest.fixture(scope="module")
def reward_model(house: House, policy: ArtifactRef) -> ArtifactRef:
    return house.make(house.reward_model(policy))
