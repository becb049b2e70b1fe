"""Task score_rollouts."""

from __future__ import annotations

from configs.rewards import FunctionSource, RewardModelSource, RewardSource
from stages.rewards.code import code_digest
from stages.score_rollouts.job import Inputs, Parameters, ScoreRollouts
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def score_rollouts(
    run: Run,
    *,
    label: str,
    rollouts: Outcome,
    sources: tuple[RewardSource, ...],
    reward_model: Outcome | None = None,
) -> Outcome:
    """Reward rollouts by every source."""
    reads_model = any(isinstance(source, RewardModelSource) for source in sources)
    model = reward_model.ref if reads_model and reward_model is not None else None
    job = ScoreRollouts(
        store=run.store,
        seed=run.config.seed,
        compute=run.trainer(every_rank=False),
        inputs=Inputs(rollouts=rollouts.ref, reward_model=model),
        parameters=Parameters(
            sources=sources,
            code={s.name: code_digest(s.function) for s in sources if isinstance(s, FunctionSource)},
            dtype=run.config.model.dtype,
            max_tokens_per_microbatch=run.config.resources.trainer.max_tokens_per_microbatch,
        ),
    )
    return complete(run, job, label=label)
