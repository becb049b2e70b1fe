"""Task train_sft."""

from __future__ import annotations

from stages.train_sft.job import Inputs, Parameters, TrainSft
from tasks.launch import complete, stage_task
from tasks.models import base_digest
from tasks.run import Outcome, Run


@stage_task
def train_sft(run: Run, *, data: Outcome) -> Outcome:
    """Train policy_0, which is also the reference policy."""
    config = run.config
    job = TrainSft(
        store=run.store,
        seed=config.seed,
        compute=run.trainer(every_rank=True),
        inputs=Inputs(data=data.ref),
        parameters=Parameters(
            model=config.model,
            sft=config.sft,
            trainer=config.resources.trainer,
            base_digest=base_digest(config.model.base, store=run.store),
        ),
    )
    return complete(run, job, label="train_sft")
