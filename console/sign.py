"""Taking over a store from another machine or person: its manifests signed anew, once every file matches them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from stages.artifacts import layout
from stages.artifacts.durable import read_json, write_bytes, write_json
from stages.artifacts.errors import InputError
from stages.artifacts.manifest import Manifest
from stages.artifacts.signing import key_id
from stages.artifacts.store import is_released, verify_files


def sign_store(store: Path, *, say: Callable[[str], None]) -> None:
    """Re-hash every artifact and sign its manifest with this machine's key. Raises InputError, DamagedArtifact.

    It says that you trust whoever wrote the store: DeepSpeed's loader will open trainer states in it.
    """
    paths = sorted((store / "artifacts").glob(f"*/*/{layout.MANIFEST}"))
    if not paths:
        raise InputError(f"--store {store}: expected a store with artifacts, found none")
    for path in paths:
        try:
            manifest = Manifest.model_validate(read_json(path))
        except (ValueError, ValidationError) as error:
            raise InputError(f"{path}: expected a manifest, found {str(error).splitlines()[0]}") from None
        if not is_released(store, manifest.ref):
            verify_files(path.parent, manifest.files, manifest.ref)
        write_json(path, manifest.signed().model_dump(mode="json"))
    write_bytes(store / layout.KEY_ID, f"{key_id()}\n".encode())
    say(f"{len(paths)} artifacts match their manifests and are signed with the key {key_id()}")
