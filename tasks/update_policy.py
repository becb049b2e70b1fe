"""Task update_policy."""

from __future__ import annotations

from stages.update_policy.job import Inputs, Parameters, TrainerState, UpdatePolicy, UpdateSettings
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def update_policy(
    run: Run, *, round_index: int, rollouts: Outcome, logprobs: Outcome, advantages: Outcome, state: TrainerState
) -> Outcome:
    """Make the round's optimizer steps."""
    config = run.config
    settings = UpdateSettings(model=config.model, algorithm=config.algorithm, trainer=config.resources.trainer)
    job = UpdatePolicy(
        store=run.store,
        seed=config.seed,
        compute=run.trainer(every_rank=True),
        inputs=Inputs(rollouts=rollouts.ref, logprobs=logprobs.ref, advantages=advantages.ref, state=state),
        parameters=Parameters(round_index=round_index, temperature=config.sampling.temperature, settings=settings),
    )
    return complete(run, job, label=f"round-{round_index:03d}-update_policy")
