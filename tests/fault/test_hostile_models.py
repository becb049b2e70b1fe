"""S04: model directories that carry or name code are refused by content, in preflight and by every loader."""

from __future__ import annotations

import runpy
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import load_config
from configs.models import FromScratch, ModelConfig, Pretrained
from flows.preflight import preflight
from stages.artifacts.errors import InputError
from stages.artifacts.model_directory import refuse_unsafe_model, safe_model, tensor_shapes
from tests.fault.hostile_models import HOSTILE, canary_program, edit

CONFIG = Path(__file__).resolve().parents[1] / "integration" / "tiny_grpo.yaml"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole little model with its tokenizer, as this house exports it."""
    from stages.models.language import base_model, export_policy
    from stages.prepare_datasets.tokenizer import train_tokenizer

    directory = tmp_path_factory.mktemp("good")
    base = FromScratch(vocabulary=300, hidden=32, layers=1, heads=1, mlp=16, max_positions=32)
    train_tokenizer(["some text"], vocabulary=300, max_tokens=32).save_pretrained(directory / "tokenizer")
    model = base_model(ModelConfig(base=base), bos=0, eos=1, pad=2)
    export_policy(model.state_dict(), like=model, tokenizer=directory / "tokenizer", directory=directory / "model")
    return directory / "model"


def _preflight(model: Path) -> None:
    change = {"model.base": {"kind": "pretrained", "path": str(model)}, "store": str(model.parent / "store")}
    preflight(load_config(CONFIG, overrides=change), until="sft")


def _loaders() -> dict[str, Callable[[Path], object]]:
    from stages.models.language import base_model, load_policy
    from stages.models.scalar import load_scalar_model
    from stages.prepare_datasets.tokenizer import load_tokenizer

    def pretrained(path: Path) -> ModelConfig:
        return ModelConfig(base=Pretrained(path=str(path)))

    return {
        "preflight": _preflight,
        "base model": lambda path: base_model(pretrained(path), bos=0, eos=1, pad=2),
        "policy": lambda path: load_policy(path, dtype="float32"),
        "scalar": lambda path: load_scalar_model(path, dtype="float32", head="seeded"),
        "tokenizer": lambda path: load_tokenizer(Pretrained(path=str(path))),
    }


# What only a whole model lacks; a tokenizer alone may be without it.
_WHOLE_MODEL = {"no config"}


def test_hostile_model_directories_are_refused_before_anything_opens_them(good: Path, tmp_path: Path) -> None:
    loaders, refused, slowest, canaries = _loaders(), 0, 0.0, 0
    for number, case in enumerate(HOSTILE):
        model, canary = tmp_path / str(number) / "model", tmp_path / f"canary-{number}"
        shutil.copytree(good, model)
        case.spoil(model, canary)
        for name, load in loaders.items():
            if name == "tokenizer" and case.name in _WHOLE_MODEL:
                continue
            started = time.monotonic()
            with pytest.raises(InputError) as caught:
                load(model)
            slowest = max(slowest, time.monotonic() - started)
            message = str(caught.value)
            if name != "tokenizer":
                assert all(word in message for word in case.words), (case.name, name, message)
            assert all(line.startswith(f"model {model}: ") and len(line) < 600 for line in message.splitlines())
            refused += 1
        canaries += canary.exists()
    print(
        f"S04: {len(HOSTILE)} hostile model directories, {refused} refusals by {len(loaders)} doors, "
        f"{canaries} canaries sang, slowest {slowest:.2f} s"
    )
    assert canaries == 0 and slowest < 5.0


def test_the_canary_is_alive(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(canary_program(tmp_path / "canary"))
    runpy.run_path(str(tmp_path / "evil.py"))
    assert (tmp_path / "canary").exists()


def test_a_good_model_passes_every_door(good: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(good, model)
    (model / "README.md").write_text("# A model\n")
    (model / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    edit(model, "config.json", _attn_implementation="sdpa", trust_remote_code=False, quantization_config=None)
    edit(model, "vocab.json", auto_map=17, __init__=18)  # words of a vocabulary, not settings
    (tmp_path / "best").symlink_to(model)
    for name, load in _loaders().items():
        load(model), load(tmp_path / "best")
        assert name
    assert tensor_shapes(model)["model.embed_tokens.weight"] == (300, 32)


def test_links_inside_the_hubs_cache_are_fine_and_out_of_it_are_not(good: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--name"
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(good.iterdir())):
        shutil.copyfile(path, cache / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    refuse_unsafe_model(snapshot)
    assert safe_model(str(snapshot), revision=None) == snapshot
    (snapshot / "LICENSE").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="LICENSE: expected a file of this directory, found a link to /etc/hostname"):
        refuse_unsafe_model(snapshot)


def test_a_model_that_cannot_be_fetched_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(InputError, match="model nobody/nothing-here: expected a directory, or a model on the hub"):
        safe_model("nobody/nothing-here", revision=None)
    with pytest.raises(InputError, match=r"model \./nosuch/model/here: expected a directory"):
        safe_model("./nosuch/model/here", revision=None)
