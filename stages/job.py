"""The contract between a task and a stage: what to read, how, and where from. Light: no torch, no Prefect."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from configs.base import Frozen
from stages.artifacts.durable import canonical_json, digest_bytes
from stages.artifacts.reference import ArtifactRef


class Compute(Frozen):
    """What a stage runs on. It can change the last bits of a result, so it is part of the identity.

    gpus: which devices, one or more per rank; empty on CPU. Which ones they are does not count.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = 1
    threads: int = 1
    gpus: tuple[int, ...] = ()


class Job(Frozen):
    """One artifact to be made. Subclasses set STAGE, VERSION and typed `inputs` and `parameters`.

    VERSION is raised by hand when the stage's code changes its result.
    EXCLUDED: dotted fields that cannot change the result and so are not part of the fingerprint.
    WORKER: which resident worker runs it.
    """

    STAGE: ClassVar[str]
    VERSION: ClassVar[int]
    WORKER: ClassVar[Literal["trainer", "generator"]] = "trainer"
    EXCLUDED: ClassVar[frozenset[str]] = frozenset()

    store: Path
    seed: int
    compute: Compute = Compute()

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (first 32 hex digits) of the recipe: stage, version, inputs, parameters, seed, compute."""
        recipe = self.model_dump(mode="json", exclude={"store"})
        for dotted in ("compute.gpus", *self.EXCLUDED):
            _remove(recipe, dotted.split("."))
        return digest_bytes(canonical_json({"stage": self.STAGE, "version": self.VERSION, **recipe}))[:32]

    @property
    def ref(self) -> ArtifactRef:
        """The name of the artifact that this job makes."""
        return ArtifactRef(stage=self.STAGE, fingerprint=self.fingerprint)

    @property
    def promises_bits(self) -> bool:
        """Whether making the artifact again gives the same bits (level A)."""
        return self.compute.device == "cpu"

    def document(self) -> dict[str, Any]:
        """The content of job.json."""
        return {"stage": self.STAGE, "version": self.VERSION, "fingerprint": self.fingerprint} | self.model_dump(
            mode="json"
        )


def _remove(tree: Any, parts: list[str]) -> None:
    """Delete the field at `parts`; `*` stands for every item of a list."""
    head, *rest = parts
    if head == "*":
        for item in tree if isinstance(tree, list) else []:
            _remove(item, rest)
    elif isinstance(tree, dict) and head in tree:
        if rest:
            _remove(tree[head], rest)
        else:
            del tree[head]
