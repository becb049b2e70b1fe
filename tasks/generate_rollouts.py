"""Task generate_rollouts."""

from __future__ import annotations

from typing import Literal

from stages.artifacts.reference import ArtifactRef
from stages.generate_rollouts.job import GenerateRollouts, Inputs, Parameters
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def generate_rollouts(run: Run, *, label: str, job: GenerateRollouts) -> Outcome:
    """Sample completions of a batch of prompts."""
    return complete(run, job, label=label)


def rollouts_job(
    run: Run,
    *,
    data: Outcome,
    policy: ArtifactRef,
    purpose: Literal["training", "preferences", "evaluation"],
    split: Literal["train", "held_out"],
    num_prompts: int,
    group_size: int,
    round_index: int | None = None,
    batch: int = 0,
) -> GenerateRollouts:
    """How a batch of prompts is sampled: evaluation is greedy; the rest follows `sampling`.

    batch: from 1 on, a refill of the round.
    """
    config = run.config
    return GenerateRollouts(
        store=run.store,
        seed=config.seed,
        compute=run.generator(),
        inputs=Inputs(data=data.ref, policy=policy),
        parameters=Parameters(
            purpose=purpose,
            round_index=-1 if round_index is None else round_index,
            split=split,
            window=round_index or 0,
            batch=batch,
            num_prompts=num_prompts,
            group_size=group_size,
            prompts_per_shard=config.rounds.prompts_per_shard,
            temperature=0.0 if purpose == "evaluation" else config.sampling.temperature,
            max_completion_tokens=config.sampling.max_completion_tokens,
            finish_fraction=config.sampling.finish_fraction if purpose == "training" else 1.0,
            max_prompt_tokens=config.data.max_prompt_tokens,
            dtype=config.model.dtype,
            generator=config.resources.generator,
        ),
    )
