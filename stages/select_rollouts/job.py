"""Contract of select_rollouts: a round's batches so far -> the groups that are trained on."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from configs.base import Frozen
from stages.artifacts.reference import ArtifactRef
from stages.job import Job


class Inputs(Frozen):
    """rollouts: generate_rollouts, a batch each, in the order in which they were sampled. rewards: of each batch."""

    rollouts: tuple[ArtifactRef, ...] = Field(min_length=1)
    rewards: tuple[ArtifactRef, ...]

    @model_validator(mode="after")
    def _of_each(self) -> Inputs:
        if len(self.rewards) != len(self.rollouts):
            raise ValueError(f"rewards: expected {len(self.rollouts)}, one per batch, found {len(self.rewards)}")
        return self


class Parameters(Frozen):
    """num_groups: how many are wanted. min_spread: of the total reward, above which a group has a signal.

    round_index: part of the order in which a batch's groups are taken. is_last: no batch follows, so the groups that
    there are must do.
    """

    round_index: int
    num_groups: int = Field(ge=1)
    group_size: int = Field(ge=2)
    min_spread: float = Field(ge=0.0)
    is_last: bool


class SelectRollouts(Job):
    """Writes groups-00000.arrow and, where the groups suffice or no batch follows, the selected groups' rows as
    rollouts-00000.arrow and rewards-00000.arrow. Gate: groups are whole, in one batch each, and one has a signal.
    """

    STAGE: ClassVar[str] = "select_rollouts"
    VERSION: ClassVar[int] = 1
    inputs: Inputs
    parameters: Parameters
