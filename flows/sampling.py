"""A round's sampling: one batch of rollouts and rewards, or, with dynamic sampling, as many as it needs.

Every batch is an artifact of its own; how many there are follows from the selections' committed figures.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from configs.schema import DynamicSampling
from stages.artifacts.reference import ArtifactRef
from tasks.beside import beside
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


@dataclass(frozen=True)
class Sampled:
    """A round's first rollouts, and the policy that all of its rollouts are from."""

    rollouts: Outcome
    policy: ArtifactRef


def sample_round(run: Run, *, round_index: int, data: Outcome, policy: ArtifactRef) -> Sampled:
    """The first rollouts of round `round_index`, from `policy`."""
    label = f"round-{round_index:03d}"
    return Sampled(_generate(run, label=label, round_index=round_index, data=data, policy=policy, batch=0), policy)


def next_round_beside(
    run: Run, *, round_index: int, data: Outcome, policy: ArtifactRef
) -> AbstractContextManager[Future[Sampled] | None]:
    """While the context lasts, the round after this one is sampled from `policy`.

    None where there is none after it, or where generator and trainer take turns on the same devices.
    """
    following = round_index + 1
    if run.config.resources.take_turns or following == run.config.rounds.count:
        return nullcontext()
    return beside(run, partial(sample_round, round_index=following, data=data, policy=policy))


def score_round(
    run: Run, *, round_index: int, sampled: Sampled, data: Outcome, reward_model: Outcome | None
) -> RoundSampling:
    """Score what was sampled; with dynamic sampling choose from it, and sample more where too few are left."""
    rule, label = run.config.rounds.dynamic_sampling, f"round-{round_index:03d}"

    def scored(rollouts: Outcome, label: str) -> Batch:
        rewards = score_rollouts(
            run,
            label=f"{label}-score_rollouts",
            rollouts=rollouts,
            sources=run.config.rewards,
            reward_model=reward_model,
        )
        return Batch(rollouts, rewards)

    batches = [scored(sampled.rollouts, label)]
    if rule is None:
        return RoundSampling(tuple(batches))
    selections: list[Outcome] = []
    most, at = _most_batches(run, rule, data), label
    while True:
        selection = select_rollouts(
            run,
            label=f"{at}-select_rollouts",
            round_index=round_index,
            rule=rule,
            rollouts=[batch.rollouts for batch in batches],
            rewards=[batch.rewards for batch in batches],
            is_last=len(batches) == most,
        )
        selections.append(selection)
        if len(batches) == most or selection.metrics["groups_selected"] == run.config.rounds.prompts_per_round:
            return RoundSampling(tuple(batches), tuple(selections))
        at, policy = f"{label}-refill-{len(batches)}", sampled.policy
        more = _generate(run, label=at, round_index=round_index, data=data, policy=policy, batch=len(batches))
        batches.append(scored(more, at))


def _generate(run: Run, *, label: str, round_index: int, data: Outcome, policy: ArtifactRef, batch: int) -> Outcome:
    rounds = run.config.rounds
    return generate_rollouts(
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


def _most_batches(run: Run, rule: DynamicSampling, data: Outcome) -> int:
    """As many as the rule allows and the prompts suffice for: a round takes each prompt once."""
    prompts = int(data.metrics["prompts_train_rows"])
    return max(1, min(rule.max_batches, prompts // run.config.rounds.prompts_per_round))
