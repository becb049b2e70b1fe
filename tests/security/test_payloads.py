"""Hostile files offered wherever a user, or somebody with the user's files in hand, can offer one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.models import ModelConfig, Pretrained
from stages.artifacts.errors import DamagedArtifact, InputError, RatchetError
from stages.artifacts.store import open_artifact
from stages.models.language import base_model
from stages.prepare_datasets.tokenizer import CHAT_TEMPLATE, load_tokenizer, train_tokenizer
from tests.security import payloads
from tests.unit.prepare_jobs import files, prepare
from tests.unit.stage_artifacts import commit_files

Offer = Callable[[Path, Path], Any]
CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 384},
}


def data(name: str, content: Callable[[Path], bytes]) -> Offer:
    """As the user's prompts."""

    def offer(folder: Path, canary: Path) -> Any:
        (folder / name).write_bytes(content(canary))
        prepare(folder, prompts=files(folder / name))

    return offer


def weights(name: str, content: Callable[[Path], bytes]) -> Offer:
    """As the weights of the user's base model."""

    def offer(folder: Path, canary: Path) -> Any:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / name).write_bytes(content(canary))
        base_model(ModelConfig(base=Pretrained(path=str(folder))), bos=1, eos=2, pad=0)

    return offer


def tokenizer_code(folder: Path, canary: Path) -> Any:
    """A tokenizer that wants code of its own to be run."""
    train_tokenizer(["a b"], vocabulary=384, max_tokens=64).save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    path.write_text(json.dumps(settings))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    return load_tokenizer(Pretrained(path=str(folder)))


def chat_template(folder: Path, canary: Path) -> Any:
    """A chat template that reaches for the operating system."""
    tokenizer = train_tokenizer(["a b"], vocabulary=384, max_tokens=64)
    tokenizer.chat_template = payloads.TEMPLATE % str(canary) + CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder / "base"))
    rows = [{"messages": [{"role": "user", "content": f"Say {i}."}]} for i in range(20)]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    prepare(folder, base=Pretrained(path=str(folder / "base")), prompts=files(folder / "chat.jsonl"), chat="always")


def stored(name: str, content: Callable[[Path], bytes], *, new: bool = False) -> Offer:
    """In place of a state that a run left, or beside it."""

    def offer(folder: Path, canary: Path) -> Any:
        kept = "optimizer.pt"
        ref = commit_files(folder, "update_policy", lambda out: (out / kept).touch(), content=1)
        (ref.path(folder) / name).write_bytes(content(canary))
        assert new == (name != kept)
        open_artifact(folder, ref)

    return offer


REFUSED: dict[str, tuple[Offer, type[RatchetError], str]] = {
    "pickled dataset": (data("rows.pkl", payloads.pickled_canary), InputError, "a pickle"),
    "pickle with a name of JSON": (data("rows.json", payloads.pickled_canary), InputError, "found a pickle"),
    "torch file as data": (data("rows.pt", payloads.torch_file), InputError, "a zip archive"),
    "object array": (data("rows.npy", payloads.object_array), InputError, "no known kind"),
    "model .bin": (weights("pytorch_model.bin", payloads.torch_file), InputError, "safetensors"),
    "pickle named safetensors": (weights("model.safetensors", payloads.torch_file), InputError, "safetensors"),
    "Parquet with a pickle for JSON": (data("rows.parquet", payloads.datasets_metadata), InputError, "Parquet"),
    "tokenizer with code": (tokenizer_code, InputError, "auto_map"),
    "chat template": (chat_template, InputError, "template"),
    "optimizer state": (stored("optimizer.pt", payloads.torch_file), DamagedArtifact, "optimizer.pt: expected"),
    "rng state": (stored("rng.pt", payloads.torch_file, new=True), DamagedArtifact, "rng.pt: not in the manifest"),
}
READ_AS_TEXT = {
    "Arrow extension type": ("rows.arrow", payloads.arrow_extension),
    "Parquet for pandas": ("rows.parquet", payloads.pandas_metadata),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_s02_a_hostile_file_is_refused_with_a_reason_and_not_run(kind: str, tmp_path: Path) -> None:
    offer, error, said = REFUSED[kind]
    canary = tmp_path / "canary"
    with pytest.raises(error) as refused:
        offer(tmp_path, canary)
    assert said in str(refused.value)
    assert not canary.exists()


@pytest.mark.parametrize("kind", sorted(READ_AS_TEXT))
def test_s02_what_hides_in_metadata_is_not_looked_at(kind: str, tmp_path: Path) -> None:
    name, content = READ_AS_TEXT[kind]
    (tmp_path / name).write_bytes(content(tmp_path / "canary"))
    made = prepare(tmp_path, prompts=files(tmp_path / name))
    assert {row["prompt"] for row in made.rows("prompts")} == {f"Say {i}." for i in range(20)}
    assert not (tmp_path / "canary").exists()
    print(f"S02: {len(REFUSED)} kinds of payload refused, {len(READ_AS_TEXT)} read as the text they hold, 0 canaries")


def test_s02_each_payload_is_live(tmp_path: Path) -> None:
    """The canaries do sing where nobody takes care, so that their silence means something."""
    import pickle

    import numpy
    import torch

    for number, content in enumerate((payloads.pickled_canary, payloads.torch_file, payloads.object_array)):
        canary, path = tmp_path / f"canary-{number}", tmp_path / "payload"
        path.write_bytes(content(canary))
        if content is payloads.torch_file:
            torch.load(path, weights_only=False)
        elif content is payloads.object_array:
            numpy.load(path, allow_pickle=True)
        else:
            pickle.loads(path.read_bytes())
        assert canary.is_dir()
