"""Task initialize_critic."""

from __future__ import annotations

from stages.initialize_critic.job import InitializeCritic, Inputs
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def initialize_critic(run: Run, *, reward_model: Outcome) -> Outcome:
    """Make critic_0 of the reward model's body and head."""
    job = InitializeCritic(store=run.store, seed=run.config.seed, inputs=Inputs(reward_model=reward_model.ref))
    return complete(run, job, label="initialize_critic")
