"""Worker pools, stores and artifacts that tests of several folders share: engines are slow, so each starts once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.artifacts.errors import GateError
from stages.job import Job
from tests.integration.pipelines import TINY_GRPO, run_flow
from tests.integration.stores import House, Pools

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # tests share their cores


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Prefect home whose database is set up once."""
    return tmp_path_factory.mktemp("prefect-home")


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory, prefect_home: Path) -> Path:
    """A store in which the run of tiny_grpo.yaml is done. Tests add to it and damage nothing."""
    store = tmp_path_factory.mktemp("tiny") / "store"
    result = run_flow(TINY_GRPO, store, home=prefect_home)
    assert result.code == 0, result.out + result.err
    return store


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    shared = Pools(tmp_path_factory.mktemp("pools"))
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def house(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("house") / "store", pools)


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as the only rank of a trainer, set up as a pool would: for gates, which would end a pool."""
    settings = {
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "RATCHET_RENDEZVOUS": str(tmp_path_factory.mktemp("rendezvous") / "file"),
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def gate(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], str]:
    """Runs a job in this process without committing; what its gate said, or nothing."""
    from stages.program import Context

    def run(job: Job) -> str:
        try:
            importlib.import_module(f"stages.{job.STAGE}.run").run(job, Context(out=tmp_path_factory.mktemp("gate")))
        except GateError as error:
            return str(error)
        return ""

    return run
