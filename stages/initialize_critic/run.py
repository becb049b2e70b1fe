"""initialize_critic: the reward model's body and head become critic_0, checked by hash."""

from __future__ import annotations

import shutil

from stages.artifacts.store import open_artifact
from stages.initialize_critic.job import InitializeCritic
from stages.models.scalar import require_same_head
from stages.program import Context, Metrics


def run(job: InitializeCritic, context: Context) -> Metrics:
    """Write critic/: the same files. Gate: its head is the reward model's."""
    if context.rank != 0:
        return {}
    source = open_artifact(job.store, job.inputs.reward_model) / "reward_model"
    target = context.out / "critic"
    shutil.copytree(source, target)
    require_same_head(source, target)
    return {}


if __name__ == "__main__":
    from stages.program import main

    main("initialize_critic")
