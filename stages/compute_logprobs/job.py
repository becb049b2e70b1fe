"""Contract of compute_logprobs: what sampling policy, reference and critic say of the rollouts before the update."""

from __future__ import annotations

from typing import ClassVar

from configs.base import Frozen
from stages.artifacts.reference import ArtifactRef
from stages.job import Job
from stages.update_policy.job import TrainerState, UpdateSettings


class Inputs(Frozen):
    """rollouts: generate_rollouts. state: the trainer at the round's start. ref_policy: train_sft; None where no KL
    is asked for, so that no memory goes to a reference. sampled_by: the policy of the rollouts, where it is an older
    one than the state's."""

    rollouts: ArtifactRef
    state: TrainerState
    ref_policy: ArtifactRef | None = None
    sampled_by: ArtifactRef | None = None


class Parameters(Frozen):
    """settings: as update_policy gets them, so that one resident trainer serves both.

    max_mismatch: bound of the gate on |old_logprobs - rollout_logprobs|: the largest difference in float32, the
    mean difference in bfloat16; nats.
    """

    temperature: float
    settings: UpdateSettings
    max_mismatch: float


class ComputeLogprobs(Job):
    """Writes logprobs-NNNNN.arrow, per file of rollouts and rank. Gate: generator and trainer agree on every rollout of
    this round.
    """

    STAGE: ClassVar[str] = "compute_logprobs"
    VERSION: ClassVar[int] = 5
    EXCLUDED: ClassVar[frozenset[str]] = frozenset(
        {"parameters.settings.trainer.gpus", "parameters.settings.algorithm.critic.initialize_from"}
    )
    inputs: Inputs
    parameters: Parameters
