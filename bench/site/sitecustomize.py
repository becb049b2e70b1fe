"""Put on PYTHONPATH by bench/durability.py: measures, or switches off, what durability costs, in every process.

RATCHET_BENCH_TIMES: a directory; each process appends the seconds of each call that hashes, flushes or writes manifests
to a file of its own, at once, because workers end by a signal.
RATCHET_BENCH_OFF: do none of it. Only a bench may: a store written like this cannot be trusted.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_TIMES = os.environ.get("RATCHET_BENCH_TIMES")
_depth = 0


def _timed(name: str, function: Any) -> Any:
    """Time a function; inside another timed one it counts once, under the outer name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _depth
        started, _depth = time.perf_counter(), _depth + 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1
            if _depth == 0 and _TIMES:
                with Path(_TIMES, str(os.getpid())).open("a") as file:
                    file.write(f"{name} {time.perf_counter() - started:.6f}\n")

    return call


def _install() -> None:
    sys.path.insert(0, str(_ROOT))
    from stages.artifacts import durable, signing

    if os.environ.get("RATCHET_BENCH_OFF"):
        durable.sync_file = lambda path: None
        durable.sync_directory = lambda path: None
        durable.digest_file = lambda path: "0" * 64
        signing.signature = lambda document: "0" * 64
        signing.is_signed = lambda document, mark: True
    from stages.artifacts import manifest, shards, store

    for module, names in (
        (store, ("verify", "clear_attempts", "new_attempt", "write_manifest", "rename")),
        (shards, ("sync_file", "digest_file", "replace", "seal")),
        (manifest, ("write_json", "index_files")),
        (durable, ("sync_file", "write_bytes")),
    ):
        for name in names:
            setattr(module, name, _timed(f"{module.__name__.rpartition('.')[2]}.{name}", getattr(module, name)))


if _TIMES or os.environ.get("RATCHET_BENCH_OFF"):
    _install()
