"""Signatures of manifests, keyed with a secret that lies outside every store. Knows no artifact.

A manifest that was edited, or that another person's store brought along, does not verify: DeepSpeed's loader, which
can run code, gets only files that a manifest of ours names by hash.
"""

from __future__ import annotations

import hmac
import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from stages.artifacts import layout
from stages.artifacts.durable import canonical_json, digest_bytes, write_bytes
from stages.artifacts.errors import InputError

_BYTES = 32


def key_path() -> Path:
    """Where the key is: $RATCHET_KEY_FILE, else ratchet/key in the user's state directory."""
    named = os.environ.get("RATCHET_KEY_FILE")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(named) if named else Path(state) / "ratchet" / "key"


def key_id() -> str:
    """A name for the key that gives nothing of it away."""
    return digest_bytes(b"key id" + _key(key_path()))[:16]


class Signed(BaseModel):
    """A document with the signature of its other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    signature: str = ""

    def signed(self) -> Self:
        """The same document with its signature."""
        return self.model_copy(update={"signature": signature(self._unsigned())})

    def is_genuine(self) -> bool:
        """Whether this machine's key signed it as it is."""
        return is_signed(self._unsigned(), self.signature)

    def _unsigned(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"signature"})


def require_key_of(store: Path) -> None:
    """Raise InputError if the manifests of `store` are signed with another key than this machine's."""
    path = store / layout.KEY_ID
    if not path.exists():
        write_bytes(path, f"{key_id()}\n".encode())
    found = path.read_text(errors="replace").strip()
    if found != key_id():
        raise InputError(
            f"store {store}: expected manifests signed with the key {key_id()} ({key_path()}), found key {found}; "
            "copy that key here and name it in RATCHET_KEY_FILE, or, if you trust all of this store, sign it anew: "
            f"python -m console sign --store {store}"
        )


def signature(document: dict[str, Any]) -> str:
    """HMAC-SHA256 of a document's canonical JSON, hex. Raises InputError if there is no key and none can be made."""
    return hmac.new(_key(key_path()), canonical_json(document), "sha256").hexdigest()


def is_signed(document: dict[str, Any], mark: str) -> bool:
    """Whether `mark` is the signature of `document`."""
    return hmac.compare_digest(signature(document), mark)


@cache
def _key(path: Path) -> bytes:
    """The key, made at first use. Of several processes that make it at once, one wins and all use its key."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mine = path.with_name(f".{path.name}.{os.getpid()}")
            descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_BYTES))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(mine, path)
            except FileExistsError:
                pass
            mine.unlink()
        key = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"signing key {path}: expected a file of {_BYTES} bytes that can be read or made, found: "
            f"{error.strerror}; name another place in RATCHET_KEY_FILE"
        ) from None
    if len(key) != _BYTES:
        raise InputError(
            f"signing key {path}: expected {_BYTES} bytes, found {len(key)}; put the right key back, or remove it and "
            "sign the store anew: python -m console sign --store STORE"
        )
    return key
