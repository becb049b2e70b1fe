"""Hostile names: wherever a name becomes part of a path, it stays inside the store, or is refused with a reason."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.load import ConfigError, load_config
from configs.sources import FileSource
from stages.artifacts import layout
from stages.artifacts.durable import read_json, write_json
from stages.artifacts.errors import DamagedArtifact, InputError
from stages.artifacts.store import ArtifactRef, open_artifact
from stages.prepare_datasets.files import locate
from stages.prepare_datasets.readers import read_source
from stages.program import load_job
from stages.score_rollouts.job import Inputs, Parameters, ScoreRollouts
from tests.integration.pipelines import ROOT
from tests.unit.stage_artifacts import commit_files, no_artifact

CONFIG = "tests/integration/tiny_grpo.yaml"
LONG = "a" * 4096
_WATCHED = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.link",
    "os.symlink",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
)
_touched: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _touched is not None and event in _WATCHED:
        resolve = os.path.realpath if event == "open" else os.path.abspath
        found = (os.fsdecode(a) for a in arguments[:2] if isinstance(a, (str, bytes, os.PathLike)))
        _touched.extend(resolve(path) for path in found if "\0" not in path)


sys.addaudithook(_watch)


def config(key: str, value: str) -> Callable[[Path], Any]:
    """The name in the user's configuration."""
    return lambda store: load_config(CONFIG, overrides={"store": str(store)} | {key: json.dumps(value)})


def job(**changes: Any) -> Callable[[Path], Any]:
    """The name in a job.json, edited by hand."""

    def read(store: Path) -> Any:
        made = ScoreRollouts(
            store=store,
            seed=1,
            inputs=Inputs(rollouts=no_artifact("generate_rollouts")),
            parameters=Parameters(sources=(), code={}, dtype="float32", max_tokens_per_microbatch=16),
        )
        document = made.document()
        reference = changes.get("reference")
        if reference is not None:
            document["inputs"]["rollouts"] |= reference
        write_json(store / "job.json", document | changes.get("top", {}))
        return load_job(store / "job.json")

    return read


def data(path: str, **more: Any) -> Callable[[Path], Any]:
    """The name of a data source."""

    def read(store: Path) -> Any:
        return list(read_source(FileSource(path=path.format(store=store), **more), role="prompts"))

    return read


def tar_member(store: Path) -> Any:
    """An archive whose member wants to be unpacked elsewhere."""
    with tarfile.open(store / "rows.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../outside/planted.jsonl"), io.BytesIO())
    return list(read_source(FileSource(path=str(store / "rows.tar")), role="prompts"))


def manifest_entry(store: Path) -> Any:
    """A manifest that lists a file outside its artifact."""
    ref = commit_files(store, "toy", lambda out: (out / "rows").touch(), content=1)
    path = ref.path(store) / layout.MANIFEST
    document = read_json(path)
    document["files"]["../../../../outside/secret"] = document["files"].pop("rows")
    path.write_text(json.dumps(document))
    return open_artifact(store, ref)


def dangling_link(store: Path) -> Any:
    """A link that leads nowhere."""
    (store / "rows.jsonl").symlink_to("../outside/nothing")
    return locate(FileSource(path=str(store / "rows.jsonl")), role="prompts")


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "name ..": (config("name", ".."), "name: "),
    "name up": (config("name", "../outside"), "name: "),
    "name absolute": (config("name", "/outside"), "name: "),
    "name home": (config("name", "~root"), "name: "),
    "name escaped": (config("name", "%2e%2e%2foutside"), "name: "),
    "name NUL": (config("name", "a\0b"), "name: "),
    "name long": (config("name", LONG), "name: "),
    "name line break": (config("name", "a\n"), "name: "),
    "store home": (config("store", "~/outside"), "${HOME}"),
    "store NUL": (config("store", "a\0b"), "control characters"),
    "store line break": (config("store", "a\n../outside"), "control characters"),
    "store long": (config("store", LONG + "a"), "at most 4096"),
    "store empty": (config("store", ""), "at least 1"),
    "function up": (config("rewards", "../outside:f"), "rewards"),
    "hub up": (data("../../outside", hub=True), "hub id"),
    "hub absolute": (data("{store}/../outside", hub=True), "hub id"),
    "hub home": (data("~root/x", hub=True), "hub id"),
    "hub escaped": (data("%2e%2e/outside", hub=True), "hub id"),
    "hub revision": (data("owner/name", hub=True, revision="../../outside"), "revision"),
    "data escaped": (data("{store}/%2e%2e/outside/planted.jsonl"), "no such file"),
    "data NUL": (data("{store}/\0"), "control characters"),
    "data long": (data("{store}/" + LONG), "at most 4096"),
    "data link": (dangling_link, "cannot be followed"),
    "tar member": (tar_member, "rows.tar"),
    "reference stage up": (job(reference={"stage": "../../outside"}), "inputs"),
    "reference stage absolute": (job(reference={"stage": "/outside"}), "inputs"),
    "reference fingerprint up": (job(reference={"fingerprint": "../../../outside"}), "inputs"),
    "reference fingerprint NUL": (job(reference={"fingerprint": "a" * 31 + "\0"}), "inputs"),
    "reference fingerprint line break": (job(reference={"fingerprint": "0" * 32 + "\n"}), "inputs"),
    "job stage up": (job(top={"stage": "../outside"}), "name of a stage"),
    "job stage a module": (job(top={"stage": "score_rollouts.run"}), "name of a stage"),
    "job stage no stage": (job(top={"stage": "artifacts"}), "name of a stage"),
    "job stage no text": (job(top={"stage": ["score_rollouts"]}), "name of a stage"),
    "job fingerprint": (job(top={"fingerprint": "../../outside"}), "was it edited?"),
    "manifest entry": (manifest_entry, "signature does not match"),
}


@pytest.fixture
def touched() -> Iterator[list[str]]:
    global _touched
    _touched = []
    yield _touched
    _touched = None


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_s06_a_hostile_name_is_refused_and_nothing_outside_is_touched(
    case: str, tmp_path: Path, touched: list[str]
) -> None:
    offer, said = HOSTILE[case]
    store, outside = tmp_path / "deep" / "store", tmp_path / "deep" / "outside"
    store.mkdir(parents=True)
    outside.mkdir()
    (outside / "planted.jsonl").write_text('{"prompt": "planted"}\n')
    (outside / "secret").write_text("")
    touched.clear()
    with pytest.raises((ConfigError, InputError, DamagedArtifact, ValidationError)) as refused:
        offer(store)
    message = str(refused.value)
    assert (
        said in message and len(message) < 6000 and (isinstance(refused.value, ValidationError) or "\0" not in message)
    )
    seen = [path for path in touched if path.startswith((str(tmp_path), "/outside", os.path.expanduser("~root/x")))]
    assert [path for path in seen if not path.startswith(str(store))] == []
    print(f"S06: {len(HOSTILE)} hostile names refused, 0 accesses outside the store")


@pytest.mark.parametrize("stage", ["../../etc", "a/b", "", "A", "a\n", "a" * 65])
def test_s06_a_reference_names_a_stage_and_a_fingerprint_and_nothing_else(stage: str) -> None:
    with pytest.raises(ValidationError):
        ArtifactRef(stage=stage, fingerprint="0" * 32)
    with pytest.raises(ValidationError):
        ArtifactRef(stage="toy", fingerprint=stage)


def test_s06_by_hand_a_hostile_job_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        job(reference={"stage": "../../etc", "fingerprint": "x"})(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "stages.score_rollouts.run", str(tmp_path / "job.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path / 'job.json'}: ") and len(done.stderr.splitlines()) == 1
