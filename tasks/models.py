"""The identity of a model that the user brings. Opens no model."""

from __future__ import annotations

from pathlib import Path

from configs.models import FromScratch, Pretrained
from stages.artifacts import layout
from stages.artifacts.digests import DigestCache


def base_digest(base: FromScratch | Pretrained, *, store: Path) -> str:
    """One digest over the names and contents of a model directory; of a hub id, its name and revision."""
    if isinstance(base, FromScratch):
        return ""
    directory = Path(base.path).expanduser()
    if not directory.is_dir():
        return f"hub:{base.path}@{base.revision or 'main'}"
    return directory_digest(base.path, store=store)


def directory_digest(path: str, *, store: Path) -> str:
    """One digest over the names and contents of a model directory; empty where there is none."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return ""
    with DigestCache(layout.digest_cache(store)) as cache:
        return cache.directory(directory)
