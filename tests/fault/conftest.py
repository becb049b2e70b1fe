"""The nursery and the undisturbed runs that every fault test is compared with: made once per session."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fault.trials import CASES, Nursery, Reference, undisturbed


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Coverage is not measured in the processes that a fault test starts, which do what other tests measure.

    Being measured makes a process's imports a third slower, and a killed one says nothing. pytest asks here for the
    tests of other folders too.
    """
    if not item.path.is_relative_to(Path(__file__).parent):
        return (yield)
    setting = os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    try:
        return (yield)
    finally:
        if setting is not None:
            os.environ["COVERAGE_PROCESS_CONFIG"] = setting


@pytest.fixture(scope="session")
def fault_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fault tests' stores lie: on one file system, so that they can share files."""
    return tmp_path_factory.mktemp("fault")


@pytest.fixture(scope="session")
def nursery(fault_home: Path) -> Iterator[Nursery]:
    """The process that runs are forked from."""
    with Nursery(fault_home / "nursery") as nursery:
        yield nursery


@pytest.fixture(scope="session")
def references(nursery: Nursery, fault_home: Path) -> Mapping[str, Reference]:
    """The undisturbed run of each case."""
    with ThreadPoolExecutor(len(CASES)) as threads:
        made = {
            name: threads.submit(undisturbed, nursery, case, fault_home / "reference" / name)
            for name, case in CASES.items()
        }
        return {name: future.result() for name, future in made.items()}
