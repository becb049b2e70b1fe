"""snapshot_trainer: the trainer's full state, so that a redo need not go back to the first round."""

from __future__ import annotations

from stages.program import Context, Metrics
from stages.recovery import resident_trainer
from stages.snapshot_trainer.job import SnapshotTrainer


def run(job: SnapshotTrainer, context: Context) -> Metrics:
    """Write what the resident trainer holds; a lost one is brought back first."""
    trainer = resident_trainer(job, job.parameters.settings, job.inputs.state, context)
    trainer.save(context.out, rank=context.rank)
    trainer.save_critic(context.out, rank=context.rank)
    return {"optimizer_steps": float(trainer.optimizer_steps)}


if __name__ == "__main__":
    from stages.program import main

    main("snapshot_trainer")
