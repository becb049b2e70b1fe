"""Task select_rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import DynamicSampling
from stages.select_rollouts.job import Inputs, Parameters, SelectRollouts
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def select_rollouts(
    run: Run,
    *,
    label: str,
    round_index: int,
    rule: DynamicSampling,
    rollouts: Sequence[Outcome],
    rewards: Sequence[Outcome],
    is_last: bool,
) -> Outcome:
    """Select the groups with a signal from a round's batches so far."""
    rounds = run.config.rounds
    job = SelectRollouts(
        store=run.store,
        seed=run.config.seed,
        inputs=Inputs(rollouts=tuple(o.ref for o in rollouts), rewards=tuple(o.ref for o in rewards)),
        parameters=Parameters(
            round_index=round_index,
            num_groups=rounds.prompts_per_round,
            group_size=rounds.group_size,
            min_spread=rule.min_spread,
            is_last=is_last,
        ),
    )
    return complete(run, job, label=label)
