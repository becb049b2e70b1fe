"""Task estimate_advantages."""

from __future__ import annotations

from configs.algorithms import Ppo
from stages.estimate_advantages.job import EstimateAdvantages, Inputs, Parameters
from stages.update_policy.job import TrainerState
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def estimate_advantages(
    run: Run, *, round_index: int, rollouts: Outcome, rewards: Outcome, logprobs: Outcome, state: TrainerState
) -> Outcome:
    """Turn rewards into credit per token."""
    algorithm = run.config.algorithm
    is_by_rank = isinstance(algorithm, Ppo) and algorithm.whitening_scope == "rank"
    job = EstimateAdvantages(
        store=run.store,
        seed=run.config.seed,
        inputs=Inputs(rollouts=rollouts.ref, rewards=rewards.ref, logprobs=logprobs.ref, state=state),
        parameters=Parameters(algorithm=algorithm, ranks=run.config.resources.trainer.ranks if is_by_rank else 1),
    )
    return complete(run, job, label=f"round-{round_index:03d}-estimate_advantages")
