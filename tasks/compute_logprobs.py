"""Task compute_logprobs."""

from __future__ import annotations

from stages.artifacts.reference import ArtifactRef
from stages.compute_logprobs.job import ComputeLogprobs, Inputs, Parameters
from stages.update_policy.job import TrainerState, UpdateSettings
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run

MAX_MISMATCH = {"float32": 1e-4, "bfloat16": 0.05}


@stage_task
def compute_logprobs(run: Run, *, label: str, job: ComputeLogprobs) -> Outcome:
    """Have the policy that sampled the round's rollouts, the reference and the critic look at them."""
    return complete(run, job, label=label)


def logprobs_job(
    run: Run, *, rollouts: ArtifactRef, sampled_by: ArtifactRef, state: TrainerState, ref_policy: ArtifactRef
) -> ComputeLogprobs:
    """Who looks at a round's rollouts, which need not be there yet."""
    config = run.config
    asks_for_kl = config.algorithm.kl_coef > 0 or config.algorithm.kl_target is not None
    settings = UpdateSettings(model=config.model, algorithm=config.algorithm, trainer=config.resources.trainer)
    return ComputeLogprobs(
        store=run.store,
        seed=config.seed,
        compute=run.trainer(every_rank=True),
        inputs=Inputs(
            rollouts=rollouts,
            state=state,
            ref_policy=ref_policy if asks_for_kl else None,
            sampled_by=None if sampled_by == state.policy else sampled_by,
        ),
        parameters=Parameters(
            temperature=config.sampling.temperature,
            settings=settings,
            max_mismatch=MAX_MISMATCH[config.model.dtype],
        ),
    )
