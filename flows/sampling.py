"""A round's sampling: one batch of rollouts and rewards, or, with dynamic sampling, as many as it needs.

Every batch is an artifact of its own; how many there are follows from the selections' committed figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import DynamicSampling
from stages.artifacts.reference import ArtifactRef
from tasks.generate_rollouts import generate_rollouts
from tasks.run import Outcome, Run
from tasks.score_rollouts import score_rollouts
from tasks.select_rollouts import select_rollouts


@dataclass(frozen=True)
class Batch:
    """Rollouts, and their rewards."""

    rollouts: Outcome
    rewards: Outcome


@dataclass(frozen=True)
class RoundSampling:
    """batches: all that were sampled, in order. selections: one after each; none without dynamic sampling."""

    batches: tuple[Batch, ...]
    selections: tuple[Outcome, ...] = ()

    @property
    def rollouts(self) -> Outcome:
        """What is trained on."""
        return self.selections[-1] if self.selections else self.batches[0].rollouts

    @property
    def rewards(self) -> Outcome:
        """The rewards of what is trained on."""
        return self.selections[-1] if self.selections else self.batches[0].rewards

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Every stage of it."""
        return (*(outcome for batch in self.batches for outcome in (batch.rollouts, batch.rewards)), *self.selections)


def sample_round(
    run: Run, *, round_index: int, data: Outcome, policy: ArtifactRef, reward_model: Outcome | None
) -> RoundSampling:
    """Sample and score a round with `policy`."""
    rounds, label = run.config.rounds, f"round-{round_index:03d}"

    def sample(batch: int, label: str) -> Batch:
        rollouts = generate_rollouts(
            run,
            label=f"{label}-generate_rollouts",
            data=data,
            policy=policy,
            purpose="training",
            split="train",
            num_prompts=rounds.prompts_per_round,
            group_size=rounds.group_size,
            round_index=round_index,
            batch=batch,
        )
        rewards = score_rollouts(
            run,
            label=f"{label}-score_rollouts",
            rollouts=rollouts,
            sources=run.config.rewards,
            reward_model=reward_model,
        )
        return Batch(rollouts, rewards)

    if rounds.dynamic_sampling is None:
        return RoundSampling((sample(0, label),))
    batches: list[Batch] = []
    selections: list[Outcome] = []
    most = _most_batches(run, rounds.dynamic_sampling, data)
    for index in range(most):
        at = label if index == 0 else f"{label}-refill-{index}"
        batches.append(sample(index, at))
        selection = select_rollouts(
            run,
            label=f"{at}-select_rollouts",
            round_index=round_index,
            rule=rounds.dynamic_sampling,
            rollouts=[batch.rollouts for batch in batches],
            rewards=[batch.rewards for batch in batches],
            is_last=index + 1 == most,
        )
        selections.append(selection)
        if selection.metrics["groups_selected"] == rounds.prompts_per_round:
            break
    return RoundSampling(tuple(batches), tuple(selections))


def _most_batches(run: Run, rule: DynamicSampling, data: Outcome) -> int:
    """As many as the rule allows and the prompts suffice for: a round takes each prompt once."""
    prompts = int(data.metrics["prompts_train_rows"])
    return max(1, min(rule.max_batches, prompts // run.config.rounds.prompts_per_round))
