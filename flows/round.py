"""One round: generate, score, look, credit, update."""

from __future__ import annotations

from dataclasses import dataclass

from configs.algorithms import Ppo
from stages.update_policy.job import TrainerState
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


def run_round(
    run: Run, *, round_index: int, data: Outcome, state: TrainerState, ref_policy: Outcome, reward_model: Outcome | None
) -> RoundResult:
    """Run round `round_index` from `state`."""
    rounds, label = run.config.rounds, f"round-{round_index:03d}"
    rollouts = generate_rollouts(
        run,
        label=f"{label}-generate_rollouts",
        data=data,
        policy=state.policy,
        purpose="training",
        split="train",
        num_prompts=rounds.prompts_per_round,
        group_size=rounds.group_size,
        round_index=round_index,
    )
    rewards = score_rollouts(
        run,
        label=f"{label}-score_rollouts",
        rollouts=rollouts,
        sources=run.config.rewards,
        reward_model=reward_model,
    )
    logprobs = compute_logprobs(run, round_index=round_index, rollouts=rollouts, state=state, ref_policy=ref_policy.ref)
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
