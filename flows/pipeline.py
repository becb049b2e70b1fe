"""WHAT HAPPENS, IN ORDER: the whole pipeline, on one screen."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

from configs.algorithms import Ppo
from configs.sources import PolicySamplesSource
from flows.report import Report
from flows.round import RoundResult, begin_round, run_round
from flows.sampling import Sampling, sample_round, sampled_beside
from stages.update_policy.job import TrainerState
from tasks.evaluate_policy import evaluate
from tasks.initialize_critic import initialize_critic
from tasks.preferences import sample_preferences
from tasks.prepare_datasets import prepare_datasets
from tasks.retention import release_superseded
from tasks.run import Outcome, Run
from tasks.snapshot_trainer import snapshot_trainer
from tasks.train_reward_model import train_reward_model
from tasks.train_sft import train_sft

Until = Literal["sft", "reward_model", "policy"]


@dataclass(frozen=True)
class Models:
    """What the rounds start from and never change."""

    data: Outcome
    ref_policy: Outcome
    reward_model: Outcome | None


def pipeline(run: Run, *, until: Until) -> Report:
    """Demonstrations -> SFT -> reward model -> critic -> rounds of generation and optimisation."""
    report = Report(run)
    data = prepare_datasets(run)
    if not run.replay:
        run.pool(run.generator_spec()).start()
    policy = train_sft(run, data=data)
    run.release_trainer()
    reward_model = None
    if run.config.reward_model is not None and until != "sft":
        preferences = run.config.data.preferences
        pairs = data
        if isinstance(preferences, PolicySamplesSource):
            pairs = sample_preferences(run, source=preferences, data=data, policy=policy)
        reward_model = train_reward_model(run, settings=run.config.reward_model, pairs=pairs, policy=policy)
        run.release_trainer()
    models = Models(data=data, ref_policy=policy, reward_model=reward_model)
    if until == "policy":
        _rounds(run, models, report)
    report.finish(policy=policy, reward_model=reward_model)
    return report


def _rounds(run: Run, models: Models, report: Report) -> None:
    config = run.config
    if not run.replay:
        run.pool(run.trainer_spec()).start()  # it imports while the generator works
    state = TrainerState(policy=models.ref_policy.ref)
    if isinstance(config.algorithm, Ppo):
        start = config.algorithm.critic.initialize_from
        critic = initialize_critic(run, start=start, policy=models.ref_policy, reward_model=models.reward_model)
        state = TrainerState(policy=models.ref_policy.ref, critic=critic.ref)
    data, reward_model = models.data, models.reward_model
    report.start(evaluate(run, policy=state.policy, data=data, reward_model=reward_model, moment="before"))
    sample = partial(sampled_beside, run, data=data)
    begin = partial(begin_round, run, ref_policy=models.ref_policy, reward_model=reward_model)
    with sample(round_index=0, policy=state.policy) as first:
        begin(round_index=0, sampling=first, state=state)
    sampled = first.made.result() if first is not None else None
    for round_index in range(config.rounds.count):
        sampled = sampled or sample_round(run, round_index=round_index, data=data, policy=state.policy)
        is_last = round_index + 1 == config.rounds.count
        is_measured = (round_index + 1) % config.evaluation.every == 0 or is_last
        with ExitStack() as beside:
            following: Sampling | None = None
            if config.rounds.staleness:
                following = beside.enter_context(sample(round_index=round_index + 1, policy=state.policy))
            result = run_round(
                run,
                round_index=round_index,
                sampled=sampled,
                data=data,
                state=state,
                ref_policy=models.ref_policy,
                reward_model=reward_model,
            )
            state = result.state
            following = following or beside.enter_context(sample(round_index=round_index + 1, policy=state.policy))
            if (round_index + 1) % config.rounds.snapshot_every == 0 or is_last:
                snapshot_trainer(run, round_index=round_index, state=state)
            if not is_measured:
                _report(run, report, result, None)
            begin(round_index=round_index + 1, sampling=following, state=state)
        sampled = following.made.result() if following is not None else None
        if is_measured:
            moment = f"after-{round_index:03d}"
            evaluation = evaluate(run, policy=state.policy, data=data, reward_model=reward_model, moment=moment)
            _report(run, report, result, evaluation)


def _report(run: Run, report: Report, result: RoundResult, evaluation: Outcome | None) -> None:
    report.add_round(result, evaluation)
    if not run.replay:
        _release_superseded(run, report)


def _release_superseded(run: Run, report: Report) -> None:
    best = report.best()
    refs = [outcome.ref for outcome in run.outcomes if outcome.label.startswith("round-")]
    best_ref = report.states.get(best[0]) if best is not None else None
    release_superseded(run.store, run.name, refs, retention=run.config.retention, best=best_ref)
