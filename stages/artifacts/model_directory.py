"""Model directories from elsewhere, refused by content before any library opens them. Light: no torch, no hub client.

No switch turns this off. What is read is JSON and safetensors, with a limit on each; nothing is imported or unpacked.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from stages.artifacts.errors import InputError

SCALAR_HEAD = "score.weight"
MAX_JSON_BYTES = 20 * 2**20
MAX_VOCABULARY_BYTES = 200 * 2**20
MAX_HEADER_BYTES = 100 * 2**20
_SHOWN = 8
_VOCABULARIES = ("tokenizer.json", "vocab.json")
_CODE = re.compile(
    r"\.(py|pyc|pyo|pyd|pyx|pth|so|dll|dylib|sh|bash|js|wasm|ipynb|exe|jar|whl|egg|cu|ptx|cubin|"  # programs
    r"pkl|pickle|pt|pt2|bin|ckpt|msgpack|h5|hdf5|keras|gguf|ggml|onnx|tflite|pb|npy|npz|joblib|dill|mar|nemo|engine|"
    r"plan|rdata|rds|mlmodel|zip|tar|gz|tgz|bz2|xz|zst|7z|rar)(\.|$)"
)
_MAGIC = {
    b"PK\x03\x04": "a zip archive (as torch.save writes)",
    b"\x7fELF": "a program",
    b"MZ": "a program",
    b"\x1f\x8b": "gzip",
    b"\x89HDF": "HDF5",
    b"GGUF": "GGUF",
    b"#!": "a script",
    **{bytes([0x80, protocol]): "a pickle" for protocol in range(2, 6)},
}
_NAMES_CODE = re.compile(
    r"auto_map|custom_pipelines?|custom_generate|trust_remote_code|kernel_config|use_kernels|_target_|py/.*|__.*__"
)
_IMPLEMENTATION = re.compile(r"_?(attn|experts|kernel)_implementation(_internal)?")
# Not flash_attention: where it is not installed, Transformers fetches it from the hub and runs it.
_BUILT_IN = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
_CLASSES = {
    "tokenizer_class": re.compile(r"[A-Za-z0-9]+(Tokenizer|TokenizerFast|Backend)"),
    "processor_class": re.compile(r"[A-Za-z0-9]+Processor"),
    "image_processor_type": re.compile(r"[A-Za-z0-9]+"),
    "feature_extractor_type": re.compile(r"[A-Za-z0-9]+"),
    "architectures": re.compile(r"[A-Za-z0-9_]+"),
    "model_type": re.compile(r"[A-Za-z0-9_.-]+"),
}


def refuse_unsafe_model(path: Path) -> None:
    """Raise InputError, a line per fault, unless `path` holds a whole model in safetensors and JSON without code."""
    _raise(path, list(_code_in(path)) + list(_missing_from(path)))


def refuse_code(path: Path) -> None:
    """Raise InputError, a line per fault, if anything in the directory `path` is code or names code."""
    _raise(path, list(_code_in(path)))


def safe_model(path: str, *, revision: str | None) -> Path:
    """The directory of a model that was looked through; of a hub id, its snapshot, with nothing but data fetched.

    Raises InputError.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = _fetched(path, revision)
    refuse_unsafe_model(directory)
    return directory


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, from the headers of the safetensors files in `path`. Raises InputError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        header = _header(file)
        if isinstance(header, str):
            raise InputError(f"{file}: {header}")
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def _raise(path: Path, faults: list[str]) -> None:
    if faults:
        more = [f"model {path}: and {len(faults) - _SHOWN} more such files"] if len(faults) > _SHOWN else []
        raise InputError("\n".join([f"model {path}: {fault}" for fault in faults[:_SHOWN]] + more))


def _fetched(path: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    allowed = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=allowed))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"model {path}: expected a directory, or a model on the hub that can be fetched or was before; "
            f"found neither: {type(error).__name__}: {reason}"
        ) from None


def _code_in(path: Path) -> Iterator[str]:
    """A line for each file of the directory that is code, can hold code or names code."""
    root = path.resolve()
    for folder, directories, files in os.walk(root):
        for name in sorted(directories + files):
            entry = Path(folder, name)
            relative = _printable(entry.relative_to(root).as_posix())
            if entry.is_symlink():
                fault = _link_fault(entry, root)
                if fault or not entry.is_file():
                    yield f"{relative}: {fault or 'expected a file, found a link to a directory'}; remove it"
                    continue
            mode = entry.stat().st_mode
            if stat.S_ISDIR(mode):
                continue
            fault = _file_fault(entry) if stat.S_ISREG(mode) else "expected a file, found a pipe, socket or device"
            if fault:
                yield f"{relative}: {fault}"


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def _link_fault(entry: Path, root: Path) -> str:
    """Links stay inside, or lead from a snapshot of the hub's cache to the blobs of the same model."""
    try:
        target = entry.resolve(strict=True)
    except (OSError, RuntimeError):
        return "expected a file, found a link that leads nowhere"
    in_cache = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    if target.is_relative_to(root) or in_cache:
        return ""
    return f"expected a file of this directory, found a link to {target}"


def _file_fault(file: Path) -> str:
    name = file.name.lower()
    if suffix := _CODE.search(name):
        return f"expected weights in safetensors and no code, found a .{suffix[1]} file; remove it"
    if name.startswith("adapter_config") and name.endswith(".json"):
        return "expected a whole model, found an adapter, which names another one to load; merge it first"
    if name.endswith(".safetensors"):
        header = _header(file)
        return header if isinstance(header, str) else ""
    if name.endswith(".json"):
        return _json_fault(file)
    with file.open("rb") as stream:
        head = stream.read(8)
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
    return f"expected text, found {kind}; remove it" if kind else ""


def _json_fault(file: Path) -> str:
    size, limit = file.stat().st_size, MAX_VOCABULARY_BYTES if file.name in _VOCABULARIES else MAX_JSON_BYTES
    if size > limit:
        return f"expected at most {limit} bytes of JSON, found {size}"
    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"expected JSON, found {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    if file.name.endswith(".index.json"):
        return _index_fault(file, document)
    if file.name.endswith("config.json") and not isinstance(document, dict):
        return f"expected a JSON object, found {type(document).__name__}"
    return next(_hostile(document), "")


def _hostile(node: Any) -> Iterator[str]:
    """Keys whose values name code to be loaded, however deep. Word lists (text -> number) are no such keys."""
    waiting = [node]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            for key, value in item.items():
                if isinstance(value, dict | list):
                    waiting.append(value)
                if fault := _key_fault(key, value):
                    yield f"{key!a}: {fault}; remove it"


def _key_fault(key: str, value: Any) -> str:
    if value is None or value is False or (isinstance(value, int) and value is not True):
        return ""
    shown = ascii(value)[:80]
    if _NAMES_CODE.fullmatch(key):
        return f"expected a model without code of its own, found {shown}"
    if key == "quantization_config":
        return f"expected weights as they were trained, found {shown}; training needs them unquantised"
    if _IMPLEMENTATION.fullmatch(key):
        values = list(value.values()) if isinstance(value, dict) else [value]
        if any(v is not None and v not in _BUILT_IN for v in values):
            return f"expected one of {', '.join(_BUILT_IN)}, found {shown}, which may be fetched and run"
    if key in _CLASSES:
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(n, str) and _CLASSES[key].fullmatch(n) for n in names):
            return f"expected the name of a class of Transformers, found {shown}"
    return ""


def _index_fault(file: Path, document: Any) -> str:
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict):
        return "expected an object with weight_map, found none"
    for name in sorted({str(value) for value in names.values()}):
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            return f"expected safetensors files of this directory, found {ascii(name)[:80]}"
        if not (file.parent / name).is_file():
            return f"expected the file {ascii(name)[:80]}, found none; is the download complete?"
    return ""


def _header(file: Path) -> dict[str, Any] | str:
    """The header of a safetensors file, or what is wrong with it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            return f"expected safetensors, found {size} bytes whose header claims {length}; was the file cut?"
        if length > MAX_HEADER_BYTES:
            return f"expected a safetensors header of at most {MAX_HEADER_BYTES} bytes, found {length}"
        data = stream.read(length)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        return "expected safetensors, found a header that is not JSON"
    if not isinstance(header, dict):
        return f"expected safetensors, found a header of {type(header).__name__}"
    for name, entry in header.items():
        if name != "__metadata__" and not _is_tensor(entry, size - 8 - length):
            return f"expected safetensors, found a bad entry for {ascii(name)[:80]}"
    return header


def _is_tensor(entry: Any, available: int) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = (_sizes(entry.get(key)) for key in ("shape", "data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        return False
    return offsets[0] <= offsets[1] <= available and prod(shape) <= 8 * available


def _sizes(value: Any) -> list[int] | None:
    is_list = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    return value if is_list else None


def _missing_from(path: Path) -> Iterator[str]:
    if not (path / "config.json").is_file():
        yield "expected a config.json, found none; is it a model directory?"
    if not any(path.glob("*.safetensors")):
        yield "expected weights in *.safetensors, found none; convert them with save_pretrained"
