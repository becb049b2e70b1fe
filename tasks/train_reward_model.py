"""Task train_reward_model."""

from __future__ import annotations

from configs.models import RewardModelConfig
from stages.train_reward_model.job import Inputs, Parameters, TrainRewardModel
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def train_reward_model(run: Run, *, settings: RewardModelConfig, pairs: Outcome, policy: Outcome) -> Outcome:
    """Train the reward model on preference pairs, from the policy's body."""
    job = TrainRewardModel(
        store=run.store,
        seed=run.config.seed,
        compute=run.trainer(every_rank=True),
        inputs=Inputs(pairs=pairs.ref, policy=policy.ref),
        parameters=Parameters(model=run.config.model, reward_model=settings, trainer=run.config.resources.trainer),
    )
    return complete(run, job, label="train_reward_model")
