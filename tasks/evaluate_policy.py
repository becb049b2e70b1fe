"""Tasks that measure a policy: greedy completions of held-out prompts, scored, summed up."""

from __future__ import annotations

from stages.artifacts.reference import ArtifactRef
from stages.evaluate_policy.job import EvaluatePolicy, Inputs, Parameters
from tasks.generate_rollouts import generate_rollouts, rollouts_job
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run
from tasks.score_rollouts import rewards_job, score_rollouts


def evaluate(run: Run, *, policy: ArtifactRef, data: Outcome, reward_model: Outcome | None, moment: str) -> Outcome:
    """Measure `policy`. moment: "before" the rounds, or "after-NNN"."""
    evaluation = run.config.evaluation
    sampling = rollouts_job(
        run,
        data=data,
        policy=policy,
        purpose="evaluation",
        split="held_out",
        num_prompts=evaluation.prompts,
        group_size=1,
    )
    rollouts = generate_rollouts(run, label=f"{moment}-generate_rollouts", job=sampling)
    scoring = rewards_job(run, rollouts=rollouts.ref, sources=evaluation.rewards, reward_model=reward_model)
    rewards = score_rollouts(run, label=f"{moment}-score_rollouts", job=scoring)
    return evaluate_policy(run, moment=moment, rollouts=rollouts, rewards=rewards)


@stage_task
def evaluate_policy(run: Run, *, moment: str, rollouts: Outcome, rewards: Outcome) -> Outcome:
    """Sum up an evaluation."""
    job = EvaluatePolicy(
        store=run.store,
        seed=run.config.seed,
        inputs=Inputs(rollouts=rollouts.ref, rewards=rewards.ref),
        parameters=Parameters(samples=run.config.evaluation.samples),
    )
    return complete(run, job, label=f"{moment}-evaluate_policy")
