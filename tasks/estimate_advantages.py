"""Task estimate_advantages."""

from __future__ import annotations

from stages.estimate_advantages.job import EstimateAdvantages, Inputs, Parameters
from stages.update_policy.job import TrainerState
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def estimate_advantages(
    run: Run, *, round_index: int, rollouts: Outcome, rewards: Outcome, logprobs: Outcome, state: TrainerState
) -> Outcome:
    """Turn rewards into credit per token."""
    job = EstimateAdvantages(
        store=run.store,
        seed=run.config.seed,
        inputs=Inputs(rollouts=rollouts.ref, rewards=rewards.ref, logprobs=logprobs.ref, state=state),
        parameters=Parameters(algorithm=run.config.algorithm),
    )
    return complete(run, job, label=f"round-{round_index:03d}-estimate_advantages")
