"""Manifests are signed with a key that is not in the store: what was edited, or comes from elsewhere, is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from console.__main__ import main
from stages.artifacts import layout, signing, store
from stages.artifacts.errors import DamagedArtifact, InputError
from stages.artifacts.manifest import Manifest
from tests.unit.toys import Toy, committed


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "secret" / "key"
    monkeypatch.setenv("RATCHET_KEY_FILE", str(path))
    return path


def test_the_key_is_made_once_and_is_private(key: Path) -> None:
    assert signing.key_path() == key
    first = signing.signature({"a": 1})
    assert key.stat().st_size == 32 and stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert signing.signature({"a": 1}) == first and signing.is_signed({"a": 1}, first)
    assert not signing.is_signed({"a": 2}, first)
    assert key.read_bytes().hex() not in signing.key_id() + first


def test_processes_that_make_the_key_at_once_use_the_same(key: Path) -> None:
    script = "from stages.artifacts.signing import key_id; print(key_id())"
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    said = {process.communicate(timeout=60)[0] for process in started}
    assert len(said) == 1 and said != {""}
    assert [path.name for path in key.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_key_of_another_length_is_refused(key: Path, content: bytes) -> None:
    key.parent.mkdir()
    key.write_bytes(content)
    with pytest.raises(InputError, match=f"expected 32 bytes, found {len(content)}"):
        signing.signature({})


def test_a_key_that_cannot_be_made_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("RATCHET_KEY_FILE", str(tmp_path / "file" / "key"))
    with pytest.raises(InputError, match="RATCHET_KEY_FILE"):
        signing.signature({})


def edited(path: Path, **fields: Any) -> None:
    manifest = path / layout.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))


def test_an_edited_file_with_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    """What a plain hash cannot see: DeepSpeed state and the manifest that vouches for it, changed together."""
    job = Toy(store=tmp_path, seed=1)
    path = committed(job)
    (path / "rows").write_bytes(b"evil")
    files = json.loads((path / layout.MANIFEST).read_text())["files"]
    entry = store.write_manifest(job, path, metrics={}, wall_seconds=0.0).files["rows"]
    document = Manifest.model_validate(json.loads((path / layout.MANIFEST).read_text()))
    (path / layout.MANIFEST).write_text(json.dumps(document.model_dump(mode="json") | {"signature": "0" * 64}))
    assert files["rows"]["sha256"] != entry.sha256
    with pytest.raises(DamagedArtifact, match="the signature does not match"):
        store.open_artifact(tmp_path, job.ref)


@pytest.mark.parametrize("field", ["metrics", "wall_seconds", "git_revision", "libraries", "version", "determinism"])
def test_every_field_is_signed(tmp_path: Path, field: str) -> None:
    job = Toy(store=tmp_path, seed=1)
    path = committed(job)
    other = {"metrics": {}, "wall_seconds": 9.0, "version": 9, "libraries": {}}.get(field, "other")
    edited(path, **{field: other})
    with pytest.raises(DamagedArtifact, match="signature"):
        store.verify(tmp_path, job.ref)


def test_a_store_from_elsewhere_is_refused_until_it_is_signed(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Toy(store=tmp_path / "store", seed=1)
    committed(job)
    signing.require_key_of(job.store)
    signing.require_key_of(job.store)
    monkeypatch.setenv("RATCHET_KEY_FILE", str(tmp_path / "other"))
    with pytest.raises(InputError, match="python -m console sign --store"):
        signing.require_key_of(job.store)
    with pytest.raises(DamagedArtifact, match="not signed with the key"):
        store.verify(job.store, job.ref)
    assert main(["sign", "--store", str(job.store)]) == 0
    assert "1 artifacts match their manifests" in capsys.readouterr().out
    signing.require_key_of(job.store)
    assert store.verify(job.store, job.ref) is not None


def test_a_damaged_store_is_not_signed(tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Toy(store=tmp_path / "store", seed=1)
    (committed(job) / "rows").write_bytes(b"rOws")
    assert main(["sign", "--store", str(job.store)]) == 4
    assert "rows: expected sha256" in capsys.readouterr().err
    assert main(["sign", "--store", str(tmp_path / "none")]) == 2
    assert os.environ["RATCHET_KEY_FILE"] not in capsys.readouterr().err
