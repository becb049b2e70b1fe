"""One round: generate, score, look, credit, update."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from configs.algorithms import Ppo
from stages.artifacts.reference import ArtifactRef
from stages.update_policy.job import TrainerState
from tasks.beside import beside
from tasks.compute_logprobs import compute_logprobs
from tasks.estimate_advantages import estimate_advantages
from tasks.generate_rollouts import generate_rollouts
from tasks.run import Outcome, Run
from tasks.score_rollouts import score_rollouts
from tasks.update_policy import update_policy


@dataclass(frozen=True)
class RoundResult:
    """The state after a round, and what each of its tasks came to."""

    round_index: int
    state: TrainerState
    rollouts: Outcome
    rewards: Outcome
    logprobs: Outcome
    advantages: Outcome
    update: Outcome


@dataclass(frozen=True)
class Sampled:
    """The rollouts of a round, and the policy that they are from."""

    rollouts: Outcome
    policy: ArtifactRef


def sample_round(run: Run, *, round_index: int, data: Outcome, policy: ArtifactRef) -> Sampled:
    """The rollouts of round `round_index` from `policy`."""
    rounds = run.config.rounds
    rollouts = generate_rollouts(
        run,
        label=f"round-{round_index:03d}-generate_rollouts",
        data=data,
        policy=policy,
        purpose="training",
        split="train",
        num_prompts=rounds.prompts_per_round,
        group_size=rounds.group_size,
        round_index=round_index,
    )
    return Sampled(rollouts=rollouts, policy=policy)


def next_round_beside(
    run: Run, *, round_index: int, data: Outcome, policy: ArtifactRef
) -> AbstractContextManager[Future[Sampled] | None]:
    """While the context lasts, the round after this one is sampled from `policy`; not with rounds.staleness 0."""
    following = round_index + 1
    if run.config.rounds.staleness == 0 or following == run.config.rounds.count:
        return nullcontext()
    return beside(run, partial(sample_round, round_index=following, data=data, policy=policy))


def run_round(
    run: Run,
    *,
    round_index: int,
    sampled: Sampled,
    state: TrainerState,
    ref_policy: Outcome,
    reward_model: Outcome | None,
) -> RoundResult:
    """Train on what was sampled for round `round_index`, from `state`."""
    label, rollouts = f"round-{round_index:03d}", sampled.rollouts
    rewards = score_rollouts(
        run,
        label=f"{label}-score_rollouts",
        rollouts=rollouts,
        sources=run.config.rewards,
        reward_model=reward_model,
    )
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
        rollouts=rollouts,
        rewards=rewards,
        logprobs=logprobs,
        advantages=advantages,
        update=update,
    )
