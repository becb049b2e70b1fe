"""The store: manifest last, rename into place, every kind of damage named, sealed shards adopted."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stages.artifacts import durable, layout, store
from stages.artifacts.errors import DamagedArtifact, GateError, LeaseHeld, ReleasedArtifact, StaleArtifact
from stages.artifacts.lease import Lease
from stages.artifacts.manifest import Manifest
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.seals import adopt, seal
from tests.unit.toys import Toy, committed


@pytest.fixture
def job(tmp_path: Path) -> Toy:
    return Toy(store=tmp_path, seed=1)


# Commit


def test_the_manifest_says_what_is_there_and_how_it_was_made(job: Toy) -> None:
    path = committed(job)
    manifest = store.verify(job.store, job.ref)
    assert manifest is not None
    assert {name: entry.bytes for name, entry in manifest.files.items()} == {"deep/weights": 7, "rows": 4}
    assert (manifest.stage, manifest.version, manifest.fingerprint) == ("toy", 3, job.fingerprint)
    assert manifest.metrics == {"loss": 0.5} and manifest.determinism == "A"
    assert manifest.job["word"] == "a" and manifest.libraries["torch"]
    assert store.open_artifact(job.store, job.ref) == path
    assert not layout.attempts(job.store, "toy", job.fingerprint).exists()


def test_the_manifest_is_written_last_then_renamed(job: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that makes a crash harmless: every file flushed, manifest, one rename, the parent flushed."""
    calls: list[str] = []
    monkeypatch.setattr(durable, "before_operation", lambda what, path: calls.append(f"{what} {path.name[-20:]}"))
    committed(job)
    name = job.fingerprint[-20:]
    begin = calls.index("fsync weights")
    assert [call for call in calls[begin:] if not call.startswith("mkdir")] == [
        "fsync weights",
        "fsync rows",
        "fsync deep",
        "write manifest.json",
        f"fsync {f'.manifest.json.{os.getpid()}.tmp'[-20:]}",
        "rename manifest.json",
        "fsync 0001",
        f"fsync {job.store.name[-20:]}",
        "fsync artifacts",
        f"rename {name}",
        "fsync toy",
        f"unlink {name}",
    ]


def test_a_crash_before_the_rename_leaves_nothing_committed(job: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "rename", crash)
        committed(job)
    assert store.verify(job.store, job.ref) is None
    assert [p.name for p in layout.attempts(job.store, "toy", job.fingerprint).iterdir()] == ["0001"]
    committed(job)
    assert store.verify(job.store, job.ref) is not None


def test_an_artifact_that_is_there_is_not_overwritten(job: Toy) -> None:
    path = committed(job)
    before = (path / layout.MANIFEST).read_bytes()
    attempt = store.new_attempt(job)
    (attempt / "rows").write_bytes(b"others")
    store.commit(job, attempt, metrics={}, wall_seconds=2.0)
    assert (path / layout.MANIFEST).read_bytes() == before and (path / "rows").read_bytes() == b"rows"


def test_attempts_are_numbered_and_the_newest_earlier_one_comes_first(job: Toy) -> None:
    first, second, third = (store.new_attempt(job) for _ in range(3))
    assert [path.name for path in (first, second, third)] == ["0001", "0002", "0003"]
    assert store.earlier_attempts(third) == [second, first]
    assert store.earlier_attempts(first) == []
    assert store.earlier_attempts(job.store) == []


# Damage


def test_nothing_committed_is_no_damage_for_verify_but_for_open(job: Toy) -> None:
    assert store.verify(job.store, job.ref) is None
    with pytest.raises(DamagedArtifact, match="expected a committed artifact, found nothing"):
        store.open_artifact(job.store, job.ref)


def _flip(path: Path) -> None:
    path.write_bytes(b"rOws")


def _link(path: Path) -> None:
    elsewhere = path.parents[3] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGE = {
    "rows: expected sha256": lambda path: _flip(path / "rows"),
    "rows: expected 4 bytes, found 2": lambda path: (path / "rows").write_bytes(b"ro"),
    "deep/weights: missing": lambda path: (path / "deep" / "weights").unlink(),
    "extra: not in the manifest": lambda path: (path / "extra").write_bytes(b""),
    "expected a manifest, found none": lambda path: (path / layout.MANIFEST).unlink(),
    "expected a manifest, found Expecting value": lambda path: (path / layout.MANIFEST).write_bytes(b""),
    "expected a manifest, found 1 validation error": lambda path: edit(path, metrics="none"),
    "expected a file, found a link": lambda path: _link(path / layout.MANIFEST),
    "expected the manifest of toy/": lambda path: edit(path, resign=True, fingerprint="0" * 32),
    "the signature does not match": lambda path: edit(path, metrics={"loss": 0.4}),
}


def edit(path: Path, *, resign: bool = False, **fields: Any) -> None:
    document = json.loads((path / layout.MANIFEST).read_text()) | fields
    if resign:
        document = Manifest.model_validate(document).signed().model_dump(mode="json")
    (path / layout.MANIFEST).write_text(json.dumps(document))


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named_and_kept_in_quarantine(job: Toy, message: str) -> None:
    path = committed(job)
    DAMAGE[message](path)
    with pytest.raises(DamagedArtifact) as caught:
        store.verify(job.store, job.ref)
    assert message in str(caught.value) and str(job.ref) in str(caught.value)
    assert (caught.value.stage, caught.value.fingerprint) == ("toy", job.fingerprint)
    kept = store.move_to_quarantine(job.store, job.ref)
    assert kept.is_dir() and kept.parent == job.store / "quarantine" / "toy"
    assert not path.exists() and store.verify(job.store, job.ref) is None
    committed(job)
    assert store.verify(job.store, job.ref) is not None


def test_every_flipped_bit_is_found(job: Toy) -> None:
    path = committed(job) / "rows"
    for bit in range(32):
        data = bytearray(b"rows")
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(data))
        os.utime(path, ns=(bit, bit))
        with pytest.raises(DamagedArtifact, match="sha256"):
            store.verify(job.store, job.ref)


def test_an_edit_that_keeps_size_and_time_is_found_in_the_same_process(job: Toy) -> None:
    path = committed(job) / "rows"
    assert store.verify(job.store, job.ref) is not None
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"rOws")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DamagedArtifact, match="sha256"):
        store.verify(job.store, job.ref)


def test_a_link_in_the_place_of_a_file_is_damage(job: Toy, tmp_path: Path) -> None:
    path = committed(job) / "rows"
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(DamagedArtifact, match="rows"):
        store.verify(job.store, job.ref)


def test_what_is_made_again_must_be_what_it_was(job: Toy) -> None:
    path = committed(job)
    (path / "rows").write_bytes(b"rOws")
    kept = store.move_to_quarantine(job.store, job.ref)
    attempt = store.new_attempt(job)
    (attempt / "rows").write_bytes(b"others")
    with pytest.raises(GateError, match="was made again and differs in deep/weights"):
        store.commit(job, attempt, metrics={}, wall_seconds=0.0)
    assert store.verify(job.store, job.ref) is None and kept.exists()
    committed(job)
    assert store.verify(job.store, job.ref) is not None


class Child(Toy):
    """An artifact made from another."""

    STAGE: ClassVar[str] = "child"
    inputs: dict[str, ArtifactRef]


def test_a_parent_that_was_made_again_to_something_else_is_no_parent(job: Toy) -> None:
    """New rollouts under an old name: what was computed from the old ones does not belong to them."""
    committed(job)
    child = Child(store=job.store, seed=1, inputs={"rollouts": job.ref})
    committed(child)
    manifest = store.verify(child.store, child.ref)
    assert manifest is not None and list(manifest.parents) == [str(job.ref)]
    store.require_parents(job.store, manifest)
    store.move_to_quarantine(job.store, job.ref).rename(job.store / "gone")
    store.require_parents(job.store, manifest)
    attempt = store.new_attempt(job)
    (attempt / "rows").write_bytes(b"others")
    store.commit(job, attempt, metrics={}, wall_seconds=0.0)
    with pytest.raises(
        StaleArtifact, match=f"was made from another {job.ref} than the one that is there now"
    ) as caught:
        store.require_parents(job.store, manifest)
    assert (caught.value.stage, caught.value.fingerprint) == ("child", child.fingerprint)
    kept = store.put_aside(job.store, child.ref, take_over=False)
    assert kept is not None and store.verify(job.store, child.ref) is None
    attempt = store.new_attempt(child)
    (attempt / "rows").write_bytes(b"from the new parent")
    store.commit(child, attempt, metrics={}, wall_seconds=0.0)
    assert store.put_aside(job.store, child.ref, take_over=False) is None, "it is whole: nothing moves"


def test_what_somebody_is_making_again_is_not_put_aside_twice(job: Toy) -> None:
    path = committed(job)
    (path / "rows").write_bytes(b"rOws")
    lock = layout.lock(job.store, job.STAGE, job.fingerprint)
    with Lease(lock, what="artifact"), pytest.raises(LeaseHeld):
        store.put_aside(job.store, job.ref, take_over=False)
    assert path.exists()


def test_a_sector_that_cannot_be_read_is_damage(job: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(job)

    def unreadable(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store, "digest_file", unreadable)
    monkeypatch.setattr(store, "_verified", {})
    with pytest.raises(DamagedArtifact, match="cannot be read: Input/output error"):
        store.verify(job.store, job.ref)


# Release


def test_a_released_artifact_counts_as_done_and_cannot_be_opened(job: Toy) -> None:
    path = committed(job)
    assert store.can_release(job.store, job.ref)
    assert store.release(job.store, job.ref) == len(b"weights")
    assert not (path / "deep").exists() and (path / "rows").read_bytes() == b"rows"
    assert store.verify(job.store, job.ref) is not None
    assert store.is_released(job.store, job.ref) and not store.can_release(job.store, job.ref)
    with pytest.raises(ReleasedArtifact, match="made again from the rollouts"):
        store.open_artifact(job.store, job.ref)
    store.move_to_quarantine(job.store, job.ref)
    committed(job)
    assert store.open_artifact(job.store, job.ref) == path


def test_a_release_that_died_half_way_is_finished_by_the_next(job: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = committed(job)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "remove", _interrupt)
        store.release(job.store, job.ref)
    assert (path / "deep").exists() and store.verify(job.store, job.ref) is not None
    with pytest.raises(ReleasedArtifact):
        store.open_artifact(job.store, job.ref)
    store.release(job.store, job.ref)
    assert not (path / "deep").exists()


def test_a_mark_that_a_killed_release_was_writing_is_no_damage(job: Toy) -> None:
    path = committed(job)
    left, strange = path / ".released.json.4711.tmp", path / ".released.json.tmp"
    left.write_bytes(b'{"rel')
    assert store.open_artifact(job.store, job.ref) == path
    store.release(job.store, job.ref)
    assert not left.exists() and store.is_released(job.store, job.ref)
    strange.write_bytes(b"")
    with pytest.raises(DamagedArtifact, match="not in the manifest"):
        store.verify(job.store, job.ref)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# Shards


def shard(attempt: Path, *, content: bytes = b"shard", sealed: bool = True) -> Path:
    attempt.mkdir(exist_ok=True)
    path = layout.shard(attempt, "rollouts", 0)
    path.write_bytes(content)
    if sealed:
        seal(path)
    return path


def test_a_sealed_shard_is_adopted_and_can_be_adopted_again(tmp_path: Path) -> None:
    old = shard(tmp_path / "0001")
    for number in ("0002", "0003"):
        new = layout.shard(tmp_path / number, "rollouts", 0)
        new.parent.mkdir()
        assert adopt(new, earlier=[old.parent])
        assert new.read_bytes() == b"shard" and os.path.samefile(old, new)
        old = new
    assert {p.name for p in (tmp_path / "0002").iterdir()} == {"rollouts-00000.arrow"}  # the mark lies beside it


@pytest.mark.parametrize("harm", ["unsealed", "flipped", "cut", "mark gone", "mark cut", "file gone"])
def test_anything_else_is_not_adopted(tmp_path: Path, harm: str) -> None:
    old = shard(tmp_path / "0001", sealed=harm != "unsealed")
    mark = tmp_path / "0001.sealed" / f"{old.name}.json"
    match harm:
        case "flipped":
            old.write_bytes(b"shird")
        case "cut":
            old.write_bytes(b"shar")
        case "mark gone":
            mark.unlink()
        case "mark cut":
            mark.write_bytes(mark.read_bytes()[:9])
        case "file gone":
            old.unlink()
    new = layout.shard(tmp_path / "0002", "rollouts", 0)
    new.parent.mkdir()
    assert not adopt(new, earlier=[old.parent])
    assert not new.exists()


def test_the_newest_undamaged_shard_wins(tmp_path: Path) -> None:
    good = shard(tmp_path / "0001", content=b"first")
    bad = shard(tmp_path / "0002", content=b"second")
    bad.write_bytes(b"sec0nd")
    new = layout.shard(tmp_path / "0003", "rollouts", 0)
    new.parent.mkdir()
    assert adopt(new, earlier=[bad.parent, good.parent])
    assert new.read_bytes() == b"first"
