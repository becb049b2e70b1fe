"""Contract of snapshot_trainer: the trainer after an update -> its full state, as one record."""

from __future__ import annotations

from typing import ClassVar

from configs.base import Frozen
from stages.job import Job
from stages.update_policy.job import TrainerState, UpdatePolicy, UpdateSettings


class Inputs(Frozen):
    """state: after an update; a fresh one needs no snapshot."""

    state: TrainerState


class Parameters(Frozen):
    """settings: as update_policy got them."""

    settings: UpdateSettings


class SnapshotTrainer(Job):
    """Writes trainer/{policy,critic} (DeepSpeed: weights, moments, counters), critic/, trainer.json."""

    STAGE: ClassVar[str] = "snapshot_trainer"
    VERSION: ClassVar[int] = 2
    EXCLUDED: ClassVar[frozenset[str]] = frozenset(
        {"parameters.settings.trainer.gpus", "parameters.settings.algorithm.critic.initialize_from"}
    )
    inputs: Inputs
    parameters: Parameters

    @classmethod
    def after(cls, update: UpdatePolicy) -> SnapshotTrainer:
        """The snapshot of the state that `update` makes."""
        critic = update.ref if update.inputs.state.critic is not None else None
        return cls(
            store=update.store,
            seed=update.seed,
            compute=update.compute,
            inputs=Inputs(state=TrainerState(policy=update.ref, critic=critic)),
            parameters=Parameters(settings=update.parameters.settings),
        )
