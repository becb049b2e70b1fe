"""What of the user's environment reaches a worker: no switch that lets outsiders in or foreign code run."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from stages.artifacts.private import private_directory

OPENERS = frozenset(
    {
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        "HF_DATASETS_TRUST_REMOTE_CODE",
    }
)
"""Switches that are never passed on: each opens an unauthenticated control port or unsafe loading."""

_QUIET = {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1"}


def kernel_directory(environment: Mapping[str, str]) -> Path:
    """Where torch keeps the kernels that it compiled, without locks that their owners left.

    torch locks by making a file, so a builder that is killed leaves its lock, and every later process would wait for
    ever. A builder keeps the file open for as long as it builds.
    """
    directory = Path(environment.get("TORCH_EXTENSIONS_DIR") or Path(sys.prefix) / "torch_extensions").absolute()
    locks = {str(path) for path in directory.glob("*/lock")}
    for path in locks - (_open_files() if locks else set()):
        Path(path).unlink(missing_ok=True)
    return directory


def _open_files() -> set[str]:
    """What the processes of this user have open."""
    found = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return found


def sheltered(environment: Mapping[str, str], *, device: Literal["cpu", "cuda"]) -> dict[str, str]:
    """The environment without OPENERS, quiet, on loopback, with caches of the user's own. Raises InputError.

    Libraries load what is in their caches without a check, and put some of them under /tmp if left alone. All
    ranks of a pool are on this host, so gloo needs no other interface; NCCL picks its own where the host has GPUs.
    """
    home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    caches = private_directory(Path(home).absolute() / "ratchet")
    kept = {name: value for name, value in environment.items() if name not in OPENERS}
    loopback = _LOOPBACK | {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    if device == "cuda":
        loopback["NCCL_SOCKET_IFNAME"] = "lo"
    return {
        **kept,
        **_QUIET,
        **loopback,
        "TORCH_EXTENSIONS_DIR": str(kernel_directory(environment)),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_CONFIG_ROOT": str(caches / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # they would lie under /tmp, whatever the cache's place
    }
