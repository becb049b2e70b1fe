"""What is refused before anything starts: seconds, not minutes. Loads no engine."""

from __future__ import annotations

import os
from pathlib import Path

from configs.rewards import FunctionSource, HttpSource, RewardSource, VerifierSource
from configs.schema import RunConfig
from configs.sources import PolicySamplesSource
from stages.artifacts import layout
from stages.artifacts.errors import InputError
from stages.artifacts.private import require_own_store
from stages.artifacts.signing import require_key_of
from stages.prepare_datasets.digests import source_digests
from stages.rewards.code import code_digest
from stages.rewards.options import validate_options


def preflight(config: RunConfig) -> None:
    """Raise InputError for what can be known to fail: missing data, unknown rewards, a store that is not writable."""
    check_store(config)
    source_digests(config.data, layout.digest_cache(Path(config.store).resolve()))
    judge = config.data.preferences.judge if isinstance(config.data.preferences, PolicySamplesSource) else ()
    for source in (*config.rewards, *config.evaluation.rewards, *judge):
        _check_source(source)


def check_store(config: RunConfig) -> None:
    """Raise InputError unless artifacts can be written to the store. Makes the directory."""
    store = Path(config.store)
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"store {store}: expected a directory that can be written, found: {error.strerror}") from None
    if not os.access(store, os.W_OK | os.X_OK):
        raise InputError(f"store {store}: expected a directory that can be written; it is not writable")
    require_own_store(store)
    require_key_of(store)


def _check_source(source: RewardSource) -> None:
    if isinstance(source, VerifierSource | HttpSource):
        validate_options(source)
    elif isinstance(source, FunctionSource):
        code_digest(source.function)
