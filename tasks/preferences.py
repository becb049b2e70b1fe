"""Tasks that make preference pairs from the SFT policy's own samples: sample, judge, label."""

from __future__ import annotations

from typing import Literal

from configs.sources import PolicySamplesSource
from stages.artifacts.reference import ArtifactRef
from stages.job import Compute
from stages.label_preferences.job import Inputs, LabelPreferences, Parameters
from tasks.generate_rollouts import generate_rollouts, rollouts_job
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run
from tasks.score_rollouts import rewards_job, score_rollouts


def sample_preferences(run: Run, *, source: PolicySamplesSource, data: Outcome, policy: Outcome) -> Outcome:
    """Sample both parts of the prompts, judge the completions and pair them."""
    judged: dict[str, ArtifactRef] = {}
    parts: tuple[tuple[Literal["train", "held_out"], int], ...] = (
        ("train", source.prompts),
        ("held_out", source.held_out_prompts),
    )
    for split, prompts in parts:
        sampling = rollouts_job(
            run,
            data=data,
            policy=policy.ref,
            purpose="preferences",
            split=split,
            num_prompts=prompts,
            group_size=source.group_size,
        )
        rollouts = generate_rollouts(run, label=f"preferences-{split}-generate_rollouts", job=sampling)
        judging = rewards_job(run, rollouts=rollouts.ref, sources=source.judge)
        rewards = score_rollouts(run, label=f"preferences-{split}-score_rollouts", job=judging)
        judged |= {f"rollouts_{split}": rollouts.ref, f"rewards_{split}": rewards.ref}
    return label_preferences(run, source=source, inputs=Inputs.model_validate(judged))


@stage_task
def label_preferences(run: Run, *, source: PolicySamplesSource, inputs: Inputs) -> Outcome:
    """Turn judged rollouts into preference pairs."""
    job = LabelPreferences(
        store=run.store,
        seed=run.config.seed,
        compute=Compute(),
        inputs=inputs,
        parameters=Parameters(pairs_per_prompt=source.pairs_per_prompt),
    )
    return complete(run, job, label="label_preferences")
