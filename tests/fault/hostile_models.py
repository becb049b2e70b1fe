"""Model directories that would run code, or lead elsewhere, if a library opened them: each around a live canary."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Spoil = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Hostile:
    """A good model directory and what spoils it: spoil(directory, canary). words: of the refusal."""

    name: str
    spoil: Spoil
    words: tuple[str, ...]


def canary_program(canary: Path) -> str:
    """Python that leaves a file behind when it is run or imported."""
    return f"from pathlib import Path\nPath({str(canary)!r}).write_text('sang')\n"


def canary_pickle(canary: Path) -> bytes:
    """A pickle that leaves a file behind when it is loaded, written by hand."""
    return f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()


def edit(directory: Path, name: str, **more: Any) -> None:
    """Add keys to a JSON file."""
    path = directory / name
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(document | more))


def _keys(name: str, **more: Any) -> Spoil:
    return lambda directory, canary: edit(directory, name, **more)


def _file(name: str, content: bytes | None = None) -> Spoil:
    """content: None for the canary, as a program for .py and as a pickle for everything else."""

    def spoil(directory: Path, canary: Path) -> None:
        program, pickle = canary_program(canary).encode(), canary_pickle(canary)
        given = content if content is not None else program if name.endswith(".py") else pickle
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(given)

    return spoil


def _auto_map(directory: Path, canary: Path) -> None:
    (directory / "modeling_evil.py").write_text(canary_program(canary))
    edit(directory, "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})


def _only_bin(directory: Path, canary: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(canary_pickle(canary))


def _torch_zip(directory: Path, canary: Path) -> None:
    with zipfile.ZipFile(directory / "weights", "w") as archive:
        archive.writestr("archive/data.pkl", canary_pickle(canary))


def _link(name: str, to: Callable[[Path], Path]) -> Spoil:
    def spoil(directory: Path, canary: Path) -> None:
        outside = directory.parent / f"outside-{directory.name}"
        shutil.copytree(directory, outside)
        (outside / "evil.py").write_text(canary_program(canary))
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(to(outside))

    return spoil


def _pipe(directory: Path, canary: Path) -> None:
    os.mkfifo(directory / "merges.txt")


def _index(directory: Path, canary: Path) -> None:
    names = {"lm_head.weight": "../../outside/model.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _index_of_pickles(directory: Path, canary: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "evil.dat"}}))
    (directory / "evil.dat").write_bytes(b"\x80\x04" + canary_pickle(canary))


def _header(length: int, data: bytes) -> bytes:
    return length.to_bytes(8, "little") + data


def _huge_header(directory: Path, canary: Path) -> None:
    with (directory / "model.safetensors").open("wb") as file:
        file.write((101 * 2**20).to_bytes(8, "little"))
        file.truncate(102 * 2**20)


def _huge_config(directory: Path, canary: Path) -> None:
    with (directory / "config.json").open("wb") as file:
        file.truncate(21 * 2**20)


def _cut(directory: Path, canary: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


_BEYOND = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**40]}}).encode()
_NESTED = {"text_config": {"vision": [{"auto_map": {"AutoConfig": "evil--configuration.Evil"}}]}}
_PYTHON = ("expected weights in safetensors and no code", ".py file")

HOSTILE = [
    Hostile("auto_map and its program", _auto_map, ("config.json", "'auto_map'", "modeling_evil.py")),
    Hostile("auto_map deep down", _keys("config.json", **_NESTED), ("config.json", "'auto_map'", "evil--")),
    Hostile(
        "auto_map of a tokenizer",
        _keys("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil/repo--tokenization.Evil", None]}),
        ("tokenizer_config.json", "'auto_map'"),
    ),
    Hostile("custom_pipelines", _keys("config.json", custom_pipelines={"x": {"impl": "evil.Pipe"}}), ("evil.Pipe",)),
    Hostile("custom_pipeline", _keys("model_index.json", custom_pipeline="evil/repo"), ("'custom_pipeline'",)),
    Hostile("trust_remote_code", _keys("config.json", trust_remote_code=True), ("'trust_remote_code'", "True")),
    Hostile(
        "a kernel of the hub as attention",
        _keys("config.json", _attn_implementation="evil/kernel:forward"),
        ("'_attn_implementation'", "eager, sdpa", "evil/kernel:forward"),
    ),
    Hostile(
        "a kernel, under the internal name, in a part",
        _keys("config.json", text_config={"_attn_implementation_internal": {"": "evil/kernel@main"}}),
        ("'_attn_implementation_internal'", "evil/kernel@main"),
    ),
    Hostile("experts", _keys("config.json", experts_implementation="evil/moe"), ("'experts_implementation'",)),
    Hostile("kernel_config", _keys("config.json", kernel_config={"RMSNorm": "evil/norm:N"}), ("'kernel_config'",)),
    Hostile(
        "a quantiser that nobody knows",
        _keys("config.json", quantization_config={"quant_method": "evil", "modules": "os"}),
        ("'quantization_config'", "unquantised"),
    ),
    Hostile(
        "a tokenizer class by path",
        _keys("tokenizer_config.json", tokenizer_class="evil.module.Tokenizer"),
        ("'tokenizer_class'", "'evil.module.Tokenizer'"),
    ),
    Hostile("a class that is no tokenizer", _keys("tokenizer_config.json", tokenizer_class="Popen"), ("'Popen'",)),
    Hostile("a processor by path", _keys("preprocessor_config.json", processor_class="os.system"), ("'os.system'",)),
    Hostile("architecture by path", _keys("config.json", architectures=["a.b.C"]), ("'architectures'", "'a.b.C'")),
    Hostile("a name of Python", _keys("config.json", __class__="os.system"), ("'__class__'", "os.system")),
    Hostile("a program", _file("helper.py"), ("helper.py", *_PYTHON)),
    Hostile("a program further down", _file("custom_generate/generate.py"), ("custom_generate/generate.py", *_PYTHON)),
    Hostile("a library", _file("kernel.so", b"\x7fELF"), ("kernel.so", ".so file")),
    Hostile("pickled weights alone", _only_bin, ("pytorch_model.bin", ".bin file", "found none; convert")),
    Hostile("pickled weights beside", _file("consolidated.00.pth"), ("consolidated.00.pth", ".pth file")),
    Hostile("pickled optimizer", _file("optimizer.pt"), ("optimizer.pt", ".pt file")),
    Hostile("a pickle as JSON", _file("generation_config.json"), ("generation_config.json", "expected JSON")),
    Hostile("a pickle without a name", _file("weights", b"\x80\x04\x95"), ("weights", "a pickle")),
    Hostile("torch.save without a name", _torch_zip, ("weights", "a zip archive")),
    Hostile("GGUF", _file("model-q4.gguf"), ("model-q4.gguf", ".gguf file")),
    Hostile("packed", _file("notes.txt", gzip.compress(b"x")), ("notes.txt", "gzip")),
    Hostile("HDF5", _file("tf_model.h5", b"\x89HDF"), ("tf_model.h5", ".h5 file")),
    Hostile("an adapter", _file("adapter_config.json", b'{"base_model_name_or_path": "evil/repo"}'), ("an adapter",)),
    Hostile("a link out", _link("vocab.txt", lambda o: o / "config.json"), ("vocab.txt", "a link to")),
    Hostile("a link to weights elsewhere", _link("model.safetensors", lambda o: o / "model.safetensors"), ("a link",)),
    Hostile("a link to a folder", _link("extra", lambda outside: outside), ("extra", "a link to")),
    Hostile("a link to itself", _link("loop", lambda o: Path("loop")), ("loop", "leads nowhere")),
    Hostile("a pipe", _pipe, ("merges.txt", "a pipe")),
    Hostile("an index that leads out", _index, ("index.json", "files of this directory", "../../outside")),
    Hostile("an index of pickles", _index_of_pickles, ("index.json", "evil.dat", "a pickle")),
    Hostile("config is a list", _file("config.json", b"[]"), ("config.json", "expected a JSON object", "list")),
    Hostile("no config", lambda d, c: (d / "config.json").unlink(), ("expected a config.json", "found none")),
    Hostile("nested too deeply", _file("config.json", b'{"a":' * 200_000), ("config.json", "RecursionError")),
    Hostile("a huge config", _huge_config, ("config.json", "at most 20971520 bytes", "22020096")),
    Hostile("weights cut", _cut, ("model.safetensors", "a bad entry")),
    Hostile("a header beyond the file", _file("model.safetensors", _header(2**60, b"{}")), ("header claims",)),
    Hostile("a huge header", _huge_header, ("model.safetensors", "header of at most 104857600 bytes")),
    Hostile("a header that is no JSON", _file("model.safetensors", _header(4, b"\x80\x04..")), ("not JSON",)),
    Hostile("tensors beyond the file", _file("model.safetensors", _header(len(_BEYOND), _BEYOND)), ("bad entry",)),
]
