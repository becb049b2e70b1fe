"""Task snapshot_trainer."""

from __future__ import annotations

from stages.snapshot_trainer.job import Inputs, Parameters, SnapshotTrainer
from stages.update_policy.job import TrainerState, UpdateSettings
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def snapshot_trainer(run: Run, *, round_index: int, state: TrainerState) -> Outcome:
    """Commit the full trainer state after a round."""
    config = run.config
    settings = UpdateSettings(model=config.model, algorithm=config.algorithm, trainer=config.resources.trainer)
    job = SnapshotTrainer(
        store=run.store,
        seed=config.seed,
        compute=run.trainer(every_rank=True),
        inputs=Inputs(state=state),
        parameters=Parameters(settings=settings),
    )
    return complete(run, job, label=f"round-{round_index:03d}-snapshot_trainer")
