"""The retention rule: what is superseded, what another run names, and what gc says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

import pytest

from configs.schema import Retention
from console.__main__ import main
from stages.artifacts import layout, store
from stages.artifacts.durable import write_json
from stages.artifacts.lease import Lease
from stages.artifacts.reference import ArtifactRef
from stages.job import Job
from tasks.retention import named_by, release_superseded, superseded
from tests.unit.toys import committed


class Update(Job):
    """A policy of a round."""

    STAGE: ClassVar[str] = "update_policy"
    VERSION: ClassVar[int] = 1
    round_index: int


class Snapshot(Update):
    """A trainer state of a round."""

    STAGE: ClassVar[str] = "snapshot_trainer"


def names(refs: list[ArtifactRef], known: dict[ArtifactRef, str]) -> list[str]:
    return [known[ref] for ref in refs]


def rounds(path: Path, run: str, count: int) -> dict[ArtifactRef, str]:
    """A run of `count` rounds, in the store and in the run's directory; what each artifact is, by name."""
    known = {}
    write_json(layout.run_directory(path, run) / "config.json", {"retention": {"snapshots": 1, "policies": 2}})
    for index in range(count):
        for kind in (Update, Snapshot):
            job = kind(store=path, seed=1, round_index=index)
            if store.verify(path, job.ref) is None:
                committed(job)
            label = f"round-{index:03d}-{job.STAGE}"
            write_json(layout.run_job(layout.run_directory(path, run), label), job.document())
            known[job.ref] = label
    return known


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    known = rounds(tmp_path, "a", 4)
    refs = list(known)
    assert names(superseded(refs, retention=Retention(snapshots=1), best=None), known) == [
        "round-000-snapshot_trainer",
        "round-001-snapshot_trainer",
        "round-002-snapshot_trainer",
    ]
    rule = Retention(snapshots=9, policies=1)
    assert names(superseded(refs, retention=rule, best=refs[2]), known) == [
        "round-000-update_policy",
        "round-002-update_policy",
    ]


def test_what_another_run_names_is_kept(tmp_path: Path) -> None:
    known = rounds(tmp_path, "a", 4)
    rounds(tmp_path, "b", 2)
    freed = release_superseded(tmp_path, "a", list(known), retention=Retention(snapshots=1, policies=1), best=None)
    released = {name for ref, name in known.items() if store.is_released(tmp_path, ref)}
    assert released == {"round-002-snapshot_trainer", "round-002-update_policy"}
    assert freed == 2 * len(b"weights")
    again = release_superseded(tmp_path, "a", list(known), retention=Retention(snapshots=1, policies=1), best=None)
    assert again == 0


def test_rounds_of_four_digits_come_last(tmp_path: Path) -> None:
    known = {}
    for index in (998, 999, 1000, 1001):
        job = Update(store=tmp_path, seed=1, round_index=index)
        write_json(layout.run_job(tmp_path, f"round-{index:03d}-update_policy"), job.document())
        known[job.ref] = index
    assert [known[ref] for ref in named_by(tmp_path)] == [998, 999, 1000, 1001]


def test_a_job_file_of_another_run_that_cannot_be_read_keeps_everything(tmp_path: Path) -> None:
    known = rounds(tmp_path, "a", 3)
    path = layout.run_job(layout.run_directory(tmp_path, "b"), "round-000-update_policy")
    path.parent.mkdir(parents=True)
    path.write_text('{"stage": "upd')
    rule = Retention(snapshots=1, policies=1)
    assert release_superseded(tmp_path, "a", list(known), retention=rule, best=None) == 0


def test_gc_frees_by_the_rule_and_leaves_a_live_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = rounds(tmp_path, "a", 4)
    best = next(ref for ref, name in known.items() if name == "round-001-update_policy")
    (layout.run_directory(tmp_path, "a") / "best").symlink_to(best.path(tmp_path) / "policy")
    unfinished = store.new_attempt(Update(store=tmp_path, seed=2, round_index=9))
    (unfinished / "half").write_bytes(b"half")
    written_by = {
        "dead": tmp_path / ".digests.json.4194305.tmp",
        "alive": tmp_path / f".digests.json.{os.getpid()}.tmp",
    }
    for path in written_by.values():
        path.write_bytes(b"half")
    with Lease(layout.run_directory(tmp_path, "a") / "lease", what="run a"):
        assert main(["gc", "--store", str(tmp_path), "--dry-run"]) == 0
        assert "left alone: run a is held by pid" in capsys.readouterr().out
    assert main(["gc", "--store", str(tmp_path), "--dry-run"]) == 0
    assert "would be freed" in capsys.readouterr().out and unfinished.exists()
    assert main(["gc", "--store", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "a: 4 superseded models" in said and "unfinished update_policy/" in said
    assert not unfinished.exists() and not written_by["dead"].exists() and written_by["alive"].exists()
    kept = {name for ref, name in known.items() if not store.is_released(tmp_path, ref)}
    assert kept == {f"round-00{i}-update_policy" for i in (1, 2, 3)} | {"round-003-snapshot_trainer"}
    assert main(["gc", "--store", str(tmp_path / "none")]) == 2


def test_gc_leaves_what_a_live_run_has_begun_and_will_come_back_to(tmp_path: Path) -> None:
    """Nobody holds its lease just then: the rest of it is done once all its rollouts are there."""
    rounds(tmp_path, "a", 1)
    job = Update(store=tmp_path, seed=2, round_index=9)
    begun = store.new_attempt(job)
    write_json(layout.run_job(layout.run_directory(tmp_path, "a"), "round-009-update_policy"), job.document())
    with Lease(layout.run_directory(tmp_path, "a") / "lease", what="run a"):
        assert main(["gc", "--store", str(tmp_path)]) == 0
        assert begun.exists()
    assert main(["gc", "--store", str(tmp_path)]) == 0
    assert not begun.exists()


def test_verify_walks_back_and_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = rounds(tmp_path, "a", 1)
    path = next(iter(known)).path(tmp_path)
    assert main(["verify", str(path / "deep")]) == 0
    assert "1 artifacts, 2 files" in capsys.readouterr().out
    (path / "rows").write_bytes(b"rOws")
    assert main(["verify", str(path)]) == 4
    assert "differs: damaged artifact update_policy/" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 2
    assert "expected a path inside an artifact" in capsys.readouterr().err
    assert json.loads((path / layout.MANIFEST).read_text())["stage"] == "update_policy"
