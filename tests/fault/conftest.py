"""The nursery and the undisturbed runs that every fault test is compared with: made once per session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fault.trials import CASES, Nursery, Reference, undisturbed


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
