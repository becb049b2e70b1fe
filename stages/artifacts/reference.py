"""The name of an artifact. Reads and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from stages.artifacts import layout


class ArtifactRef(BaseModel):
    """The name of an artifact: the stage that makes it and the fingerprint of its recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: str = Field(pattern=r"^[a-z_]{1,64}$")
    fingerprint: str = Field(pattern=r"^[0-9a-f]{32}$")

    def path(self, store: Path) -> Path:
        """Where it is once committed."""
        return layout.artifact(store, self.stage, self.fingerprint)

    def __str__(self) -> str:
        return f"{self.stage}/{self.fingerprint}"


def references(tree: Any) -> Iterator[ArtifactRef]:
    """Every artifact named in a job's inputs, as JSON."""
    if isinstance(tree, dict):
        if tree.keys() == {"stage", "fingerprint"}:
            yield ArtifactRef(**tree)
        else:
            for value in tree.values():
                yield from references(value)
