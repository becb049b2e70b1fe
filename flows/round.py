"""One round: generate, score, look, credit, update."""

from __future__ import annotations

from dataclasses import dataclass

from configs.algorithms import Ppo
from flows.sampling import RoundSampling, Sampled, score_round
from stages.update_policy.job import TrainerState
from tasks.compute_logprobs import compute_logprobs
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
    rollouts, rewards = sampling.rollouts, sampling.rewards
    logprobs = compute_logprobs(
        run,
        round_index=round_index,
        rollouts=rollouts,
        sampled_by=sampled.policy,
        state=state,
        ref_policy=ref_policy.ref,
    )
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
