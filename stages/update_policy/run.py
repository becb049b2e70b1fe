"""update_policy: the round's optimizer steps on the resident trainer, and the policy that they lead to."""

from __future__ import annotations

from stages.artifacts import layout, schemas
from stages.artifacts.shards import write_table
from stages.optimization import update
from stages.program import Context, Metrics
from stages.recovery import advance_resident_trainer, drop_resident_trainer, resident_trainer
from stages.update_policy.job import UpdatePolicy


def run(job: UpdatePolicy, context: Context) -> Metrics:
    """Make every optimizer step of the round, then write policy, counters and metrics."""
    parameters = job.parameters
    trainer = resident_trainer(job, parameters.settings, job.inputs.state, context)
    drop_resident_trainer(context)
    made = update(job, trainer, context)
    trainer.save_policy(context.out, rank=context.rank)
    advance_resident_trainer(job, parameters.settings, trainer, context)
    if context.rank == 0:
        figures = [
            {"round_index": parameters.round_index, "stage": job.STAGE, "step": i, "metric": m, "value": v}
            for i, step in enumerate(made.steps)
            for m, v in sorted(step.items())
        ]
        write_table(layout.shard(context.out, "metrics", 0), figures, schemas.METRICS)
    means = {name: sum(step[name] for step in made.steps) / len(made.steps) for name in made.steps[0]}
    return means | {"optimizer_steps": float(len(made.steps)), "completion_tokens": float(made.completion_tokens)}


if __name__ == "__main__":
    from stages.program import main

    main("update_policy")
