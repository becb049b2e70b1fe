"""Task prepare_datasets."""

from __future__ import annotations

from configs.sources import PolicySamplesSource
from stages.artifacts import layout
from stages.job import Compute
from stages.prepare_datasets.digests import source_digests
from stages.prepare_datasets.job import Parameters, PrepareDatasets
from tasks.launch import complete, stage_task
from tasks.run import Outcome, Run


@stage_task
def prepare_datasets(run: Run) -> Outcome:
    """Read, clean, encode and split the run's data."""
    config, data = run.config, run.config.data
    if isinstance(data.preferences, PolicySamplesSource):
        data = data.model_copy(update={"preferences": None})  # made later, from the policy's own samples
    digests = source_digests(data, layout.digest_cache(run.store))
    parameters = Parameters(data=data, base=config.model.base, digests=digests)
    job = PrepareDatasets(store=run.store, seed=config.seed, compute=Compute(), parameters=parameters)
    return complete(run, job, label="prepare_datasets")
