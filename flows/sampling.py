"""A round's sampling: one batch of rollouts and rewards, or, with dynamic sampling, as many as it needs.

Every batch is an artifact of its own; how many there are follows from the selections' committed figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from configs.schema import DynamicSampling
from stages.artifacts.reference import ArtifactRef
from stages.generate_rollouts.job import GenerateRollouts
from stages.score_rollouts.job import ScoreRollouts
from tasks.beside import beside
from tasks.generate_rollouts import generate_rollouts, rollouts_job
from tasks.run import Outcome, Run
from tasks.score_rollouts import rewards_job, score_rollouts
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


@dataclass(frozen=True)
class Sampling:
    """A round's first rollouts, while they are sampled. job: what is asked for. made: what comes of it."""

    job: GenerateRollouts
    made: Future[Sampled]


def sample_round(run: Run, *, round_index: int, data: Outcome, policy: ArtifactRef) -> Sampled:
    """The first rollouts of round `round_index`, from `policy`."""
    job = _sampling(run, round_index=round_index, data=data, policy=policy)
    return _sample(run, job, label=f"round-{round_index:03d}")


@contextmanager
def sampled_beside(run: Run, *, round_index: int, data: Outcome, policy: ArtifactRef) -> Iterator[Sampling | None]:
    """While the context lasts, round `round_index` is sampled from `policy`.

    None where there is no such round, or where generator and trainer take turns on the same devices.
    """
    if run.config.resources.take_turns or round_index == run.config.rounds.count:
        yield None
        return
    job = _sampling(run, round_index=round_index, data=data, policy=policy)
    with beside(run, partial(_sample, job=job, label=f"round-{round_index:03d}")) as made:
        yield Sampling(job, made)


def score_round(
    run: Run, *, round_index: int, sampled: Sampled, data: Outcome, reward_model: Outcome | None
) -> RoundSampling:
    """Score what was sampled; with dynamic sampling choose from it, and sample more where too few are left."""
    rule, label = run.config.rounds.dynamic_sampling, f"round-{round_index:03d}"

    def scored(rollouts: Outcome, label: str) -> Batch:
        job = scoring(run, rollouts=rollouts.ref, reward_model=reward_model)
        return Batch(rollouts, score_rollouts(run, label=f"{label}-score_rollouts", job=job))

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
        job = _sampling(run, round_index=round_index, data=data, policy=policy, batch=len(batches))
        batches.append(scored(_sample(run, job, label=at).rollouts, at))


def scoring(run: Run, *, rollouts: ArtifactRef, reward_model: Outcome | None) -> ScoreRollouts:
    """How a round's rollouts are scored."""
    return rewards_job(run, rollouts=rollouts, sources=run.config.rewards, reward_model=reward_model)


def _sampling(run: Run, *, round_index: int, data: Outcome, policy: ArtifactRef, batch: int = 0) -> GenerateRollouts:
    rounds = run.config.rounds
    return rollouts_job(
        run,
        data=data,
        policy=policy,
        purpose="training",
        split="train",
        num_prompts=rounds.prompts_per_round,
        group_size=rounds.group_size,
        round_index=round_index,
        batch=batch,
    )


def _sample(run: Run, job: GenerateRollouts, *, label: str) -> Sampled:
    return Sampled(generate_rollouts(run, label=f"{label}-generate_rollouts", job=job), job.inputs.policy)


def _most_batches(run: Run, rule: DynamicSampling, data: Outcome) -> int:
    """As many as the rule allows and the prompts suffice for: a round takes each prompt once."""
    prompts = int(data.metrics["prompts_train_rows"])
    return max(1, min(rule.max_batches, prompts // run.config.rounds.prompts_per_round))
