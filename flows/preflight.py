"""What is refused before anything starts: seconds, not minutes. Loads no engine."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from configs.algorithms import Ppo
from configs.critic import FromDirectory
from configs.models import Pretrained
from configs.schema import RunConfig
from configs.sources import PolicySamplesSource, SortDigitsSource
from flows.estimate import check_disk
from flows.floors import check_versions
from flows.machine import check_machine
from stages.artifacts import layout
from stages.artifacts.errors import InputError
from stages.artifacts.model_directory import SCALAR_HEAD, refuse_unsafe_model, tensor_shapes
from stages.artifacts.private import require_own_store
from stages.artifacts.signing import require_key_of
from stages.prepare_datasets.digests import source_digests
from stages.prepare_datasets.files import file_sources, locate
from stages.rewards.options import validate_options
from tasks.kept import committed_stages
from tasks.run import run_name

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def preflight(config: RunConfig, *, until: str = "policy") -> None:
    """Raise InputError, a line per fault and all faults at once, for what can be known to fail.

    until: where the run stops.
    """
    store = Path(config.store).resolve()
    judge = config.data.preferences.judge if isinstance(config.data.preferences, PolicySamplesSource) else ()
    faults = _faults(lambda: check_store(config))
    cache = None if faults else layout.digest_cache(store)
    faults += _faults(
        check_versions,
        lambda: check_machine(config.resources),
        lambda: _check_data(config, cache),
        lambda: _check_counts(config),
        lambda: _check_model(config),
        lambda: _check_critic(config),
        *(partial(validate_options, source) for source in (*config.rewards, *config.evaluation.rewards, *judge)),
    )
    if not faults:
        done = committed_stages(layout.run_directory(store, run_name(config)), store=store)
        faults = _faults(lambda: check_disk(config, done=frozenset(done), until=until))
    if faults:
        raise InputError("\n".join(dict.fromkeys(faults)))


def check_store(config: RunConfig) -> None:
    """Raise InputError unless artifacts can be written to the store. Makes the directory, and tries with a file."""
    store = Path(config.store)
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store) as probe:
            probe.write(bytes(4096))
            probe.flush()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"store {store}: expected a directory that can be written, found: {reason}") from None
    require_own_store(store)
    require_key_of(store)


def _faults(*checks: Callable[[], object]) -> list[str]:
    faults: list[str] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            faults += str(error).splitlines()
    return faults


def _check_data(config: RunConfig, cache: Path | None) -> None:
    """Hash the input files, so that the stages need not; where that cannot be remembered, only look for them."""
    if cache is not None:
        source_digests(config.data, cache)
        return
    for role, source in file_sources(config.data).items():
        if not source.hub:
            locate(source, role=role)


def _check_model(config: RunConfig) -> None:
    base = config.model.base
    if not isinstance(base, Pretrained):
        return
    directory = Path(base.path).expanduser()
    if directory.is_dir():
        refuse_unsafe_model(directory)
    elif not _HUB_ID.fullmatch(base.path):
        raise InputError(f"model.base.path: expected a directory or a hub id, found no directory {base.path}")


def _check_critic(config: RunConfig) -> None:
    """Look through a directory that the critic starts from; from file headers alone."""
    start = config.algorithm.critic.initialize_from if isinstance(config.algorithm, Ppo) else None
    if not isinstance(start, FromDirectory):
        return
    key, directory = "algorithm.critic.initialize_from", Path(start.path).expanduser()
    if not directory.is_dir():
        raise InputError(f"{key}.path: expected a model directory of this machine, found none at {start.path}")
    refuse_unsafe_model(directory)
    shape = tensor_shapes(directory).get(SCALAR_HEAD)
    if start.head == "keep" and (shape is None or len(shape) != 2 or shape[0] != 1):
        raise InputError(
            f"model {directory}: expected a scalar head {SCALAR_HEAD} of one row to keep, found "
            f"{'none' if shape is None else f'the shape {shape}'}; {key}.head: zero or seeded gives it a new one"
        )


def _check_counts(config: RunConfig) -> None:
    """Refuse a round of more prompts than there can be; how many there are exactly is known once they are read."""
    prompts, need = config.data.prompts, config.rounds.prompts_per_round
    most = prompts.rows if isinstance(prompts, SortDigitsSource) else prompts.limit
    if most is not None and need > most:
        raise InputError(f"rounds.prompts_per_round: expected at most {most}, which data.prompts has, found {need}")
