"""Put on PYTHONPATH by bench/durability.py and bench/overhead.py: measures, or switches off, what durability costs, and
notes when programs run, in every process.

RATCHET_BENCH_TIMES: a directory; each process appends the seconds of each call that hashes, flushes or writes manifests
to a file of its own, at once, because workers end by a signal.
RATCHET_BENCH_PROGRAMS: a directory; each process appends when each program of a stage began and ended.
RATCHET_BENCH_OFF: do none of it. Only a bench may: a store written like this cannot be trusted.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
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


def _note_programs(directory: str) -> None:
    """Wrap `run` of every stages.<name>.run as it is imported by name: that is how a worker finds its program."""
    found = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        module = found(name, package)
        if re.fullmatch(r"stages\.\w+\.run", name) and not hasattr(module.run, "__wrapped__"):
            module.run = _noted(name.split(".")[1], module.run, Path(directory, str(os.getpid())))
        return module

    importlib.import_module = import_module


def _noted(stage: str, function: Any, log: Path) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            with log.open("a") as file:
                file.write(f"{stage} {began:.6f} {time.time():.6f}\n")

    return run


if _TIMES or os.environ.get("RATCHET_BENCH_OFF"):
    _install()
if os.environ.get("RATCHET_BENCH_PROGRAMS"):
    _note_programs(os.environ["RATCHET_BENCH_PROGRAMS"])
