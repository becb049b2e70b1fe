"""Which groups of a round are trained on: a pure function of their rewards and of coordinates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stages.artifacts.errors import GateError
from stages.artifacts.seeds import seed_at

Fate = Literal["selected", "no_signal", "not_needed"]


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, by their least and greatest total reward; batch: which of the round's."""

    prompt_id: str
    batch: int
    lowest: float
    highest: float


def select_groups(
    groups: Iterable[Group], *, num_groups: int, min_spread: float, seed: int, round_index: int
) -> dict[str, Fate]:
    """What becomes of each group, by prompt_id.

    A group has a signal if highest - lowest > min_spread. Of those, the first `num_groups` are selected: batch by
    batch, so that a refill changes nothing about what came before it, and within a batch in an order drawn for the
    round, so that no prompt is preferred over the rounds. Raises GateError for a prompt that comes twice.
    """
    fates: dict[str, Fate] = {}
    left = num_groups
    for group in sorted(groups, key=lambda g: (g.batch, seed_at(seed, "select_rollouts", round_index, g.prompt_id))):
        if group.prompt_id in fates:
            raise GateError(f"prompt_id {group.prompt_id}: expected it in one batch of the round, found it in two")
        if not group.highest - group.lowest > min_spread:
            fates[group.prompt_id] = "no_signal"
        elif left:
            fates[group.prompt_id] = "selected"
            left -= 1
        else:
            fates[group.prompt_id] = "not_needed"
    return fates
