"""The one full run that the runtime tests share."""

from __future__ import annotations

import pytest

from tests.security.audited import AuditedRun, audited_run


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> AuditedRun:
    """A full run under audit, done."""
    run = audited_run(tmp_path_factory.mktemp("audited"))
    assert run.code == 0, run.out + run.err
    assert run.resumed == 0, (run.root / "resumed").read_text()
    return run
