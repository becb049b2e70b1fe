"""Contract of prepare_datasets: the user's data -> prompts, demonstrations, preference pairs, tokenizer, report."""

from __future__ import annotations

from typing import ClassVar

from configs.base import Frozen
from configs.models import FromScratch, Pretrained
from configs.rewards import SETTINGS_OF_ASKING
from configs.sources import DataConfig
from stages.job import Job


class Parameters(Frozen):
    """data: sources and cuts. base: whose tokenizer (a new one is trained for a model from scratch).

    digests: `digests.source_digests(data)`: sha256 of every input file, keyed `<role>/<name inside the source>`
    (so that a changed row is a new recipe); where files lie does not count, what is in them does.
    """

    data: DataConfig
    base: FromScratch | Pretrained
    digests: dict[str, str]


class PrepareDatasets(Job):
    """Writes tokenizer/, {prompts,demonstrations,pairs}_{train,held_out}-00000.arrow, report.json.

    Kinds without a source are not written. Metrics: rows kept and dropped, by kind.
    """

    STAGE: ClassVar[str] = "prepare_datasets"
    VERSION: ClassVar[int] = 1
    EXCLUDED: ClassVar[frozenset[str]] = frozenset(
        {
            "parameters.data.prompts.path",
            "parameters.data.demonstrations.path",
            "parameters.data.preferences.path",
            *(f"parameters.data.preferences.judge.*.{name}" for name in SETTINGS_OF_ASKING),
        }
    )
    parameters: Parameters
