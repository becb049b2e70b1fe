"""Task score_rollouts."""

from __future__ import annotations

from configs.rewards import FunctionSource, RewardModelSource, RewardSource
from stages.artifacts.reference import ArtifactRef
from stages.rewards.code import code_digest
from stages.score_rollouts.job import Inputs, Parameters, ScoreRollouts
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def score_rollouts(run: Run, *, label: str, job: ScoreRollouts) -> Outcome:
    """Reward rollouts by every source."""
    return complete(run, job, label=label)


def rewards_job(
    run: Run, *, rollouts: ArtifactRef, sources: tuple[RewardSource, ...], reward_model: Outcome | None = None
) -> ScoreRollouts:
    """How rollouts are rewarded, which need not be there yet."""
    reads_model = any(isinstance(source, RewardModelSource) for source in sources)
    model = reward_model.ref if reads_model and reward_model is not None else None
    return ScoreRollouts(
        store=run.store,
        seed=run.config.seed,
        compute=run.trainer(every_rank=False),
        inputs=Inputs(rollouts=rollouts, reward_model=model),
        parameters=Parameters(
            sources=sources,
            code={s.name: code_digest(s.function) for s in sources if isinstance(s, FunctionSource)},
            dtype=run.config.model.dtype,
            max_tokens_per_microbatch=run.config.resources.trainer.max_tokens_per_microbatch,
        ),
    )
