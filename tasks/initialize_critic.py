"""Task initialize_critic."""

from __future__ import annotations

from configs.critic import CriticStart, FromDirectory, FromRewardModel
from stages.initialize_critic.job import InitializeCritic, Inputs, Parameters
from tasks.launch import complete, stage_task
from tasks.models import directory_digest
from tasks.run import Outcome, Run


@stage_task
def initialize_critic(run: Run, *, start: CriticStart, policy: Outcome, reward_model: Outcome | None) -> Outcome:
    """Make critic_0 of the body that the configuration names, and of its head or a new one."""
    if isinstance(start, FromRewardModel):
        assert reward_model is not None, "the configuration requires one for this start"
        inputs = Inputs(reward_model=reward_model.ref)
    else:
        inputs = Inputs(policy=policy.ref)
    digest = directory_digest(start.path, store=run.store) if isinstance(start, FromDirectory) else ""
    job = InitializeCritic(
        store=run.store,
        seed=run.config.seed,
        inputs=inputs,
        parameters=Parameters(start=start, dtype=run.config.model.dtype, start_digest=digest),
    )
    return complete(run, job, label="initialize_critic")
