"""Task compute_logprobs."""

from __future__ import annotations

from stages.artifacts.reference import ArtifactRef
from stages.compute_logprobs.job import ComputeLogprobs, Inputs, Parameters
from stages.update_policy.job import TrainerState, UpdateSettings
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run

MAX_MISMATCH = {"float32": 1e-4, "bfloat16": 0.05}


@stage_task
def compute_logprobs(
    run: Run,
    *,
    round_index: int,
    rollouts: Outcome,
    sampled_by: ArtifactRef,
    state: TrainerState,
    ref_policy: ArtifactRef,
) -> Outcome:
    """Have the policy that sampled the round's rollouts, the reference and the critic look at them."""
    config = run.config
    asks_for_kl = config.algorithm.kl_coef > 0 or config.algorithm.kl_target is not None
    settings = UpdateSettings(model=config.model, algorithm=config.algorithm, trainer=config.resources.trainer)
    job = ComputeLogprobs(
        store=run.store,
        seed=config.seed,
        compute=run.trainer(every_rank=True),
        inputs=Inputs(
            rollouts=rollouts.ref,
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
    return complete(run, job, label=f"round-{round_index:03d}-compute_logprobs")
