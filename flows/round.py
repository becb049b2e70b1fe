"""One round: generate, score, look, credit, update."""

from __future__ import annotations

from dataclasses import dataclass

from configs.algorithms import Ppo
from flows.sampling import RoundSampling, Sampled, Sampling, score_round, scoring
from stages.job import Job
from stages.update_policy.job import TrainerState
from tasks.ahead import work_ahead
from tasks.compute_logprobs import compute_logprobs, logprobs_job
from tasks.estimate_advantages import estimate_advantages
from tasks.run import Outcome, Run
from tasks.update_policy import update_policy


@dataclass(frozen=True)
class RoundResult:
    """The state after a round, and what each of its tasks came to."""

    round_index: int
    state: TrainerState
    sampling: RoundSampling
    logprobs: Outcome
    advantages: Outcome
    update: Outcome


def begin_round(
    run: Run,
    *,
    round_index: int,
    sampling: Sampling | None,
    state: TrainerState,
    ref_policy: Outcome,
    reward_model: Outcome | None,
) -> None:
    """While round `round_index` is sampled, score what is there, and have policy, reference and critic look at it.

    sampling: None where there is nothing to do meanwhile.
    """
    label = f"round-{round_index:03d}"
    if sampling is None or f"{label}-generate_rollouts" in run.kept:  # kept ones have another name than the job's
        return
    rollouts, policy = sampling.job.ref, sampling.job.inputs.policy
    jobs: dict[str, Job] = {
        f"{label}-score_rollouts": scoring(run, rollouts=rollouts, reward_model=reward_model),
    }
    if run.config.rounds.dynamic_sampling is None:  # with it, what is looked at is chosen by all rewards
        jobs[f"{label}-compute_logprobs"] = logprobs_job(
            run, rollouts=rollouts, sampled_by=policy, state=state, ref_policy=ref_policy.ref
        )
    work_ahead(run, sampling.job, jobs, until=sampling.made)


def run_round(
    run: Run,
    *,
    round_index: int,
    sampled: Sampled,
    data: Outcome,
    state: TrainerState,
    ref_policy: Outcome,
    reward_model: Outcome | None,
) -> RoundResult:
    """Train on what was sampled for round `round_index`, from `state`."""
    sampling = score_round(run, round_index=round_index, sampled=sampled, data=data, reward_model=reward_model)
    rollouts, rewards, policy = sampling.rollouts, sampling.rewards, sampled.policy
    looking = logprobs_job(run, rollouts=rollouts.ref, sampled_by=policy, state=state, ref_policy=ref_policy.ref)
    logprobs = compute_logprobs(run, label=f"round-{round_index:03d}-compute_logprobs", job=looking)
    advantages = estimate_advantages(
        run, round_index=round_index, rollouts=rollouts, rewards=rewards, logprobs=logprobs, state=state
    )
    update = update_policy(
        run, round_index=round_index, rollouts=rollouts, logprobs=logprobs, advantages=advantages, state=state
    )
    critic = update.ref if isinstance(run.config.algorithm, Ppo) else None
    return RoundResult(
        round_index=round_index,
        state=TrainerState(policy=update.ref, critic=critic),
        sampling=sampling,
        logprobs=logprobs,
        advantages=advantages,
        update=update,
    )
