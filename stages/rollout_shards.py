"""Stages that work through rollouts shard by shard: what they make of each is durable by itself.

So it can be made while later shards are still being sampled (tasks/ahead.py), and is not made again after a worker was
lost. What it holds depends on its rollouts alone, never on when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.artifacts import layout, schemas
from stages.artifacts.durable import canonical_json, digest_bytes, digest_file
from stages.artifacts.errors import GateError, InputError, TransientError
from stages.artifacts.manifest import content_of_inputs, damaged, read_manifest
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.seals import adopt, find_sealed, seal
from stages.artifacts.seeds import seed_at, seed_libraries
from stages.artifacts.shards import by_key, read_table, write_table
from stages.artifacts.store import earlier_attempts, open_artifact

if TYPE_CHECKING:
    from stages.job import Job
    from stages.program import Context

Row = dict[str, Any]
Key = tuple[str, int]
ROLLOUTS = "rollouts"


@dataclass(frozen=True)
class RolloutShard:
    """One finished shard of rollouts. sha256: of its bytes. places: it lies in the first, or by now in a later one."""

    index: int
    sha256: str
    places: tuple[Path, ...]

    def order(self) -> dict[str, Any]:
        """As a line to a worker says it."""
        return {"index": self.index, "sha256": self.sha256, "places": [str(place) for place in self.places]}

    @classmethod
    def ordered(cls, order: dict[str, Any]) -> RolloutShard:
        """What order() said."""
        return cls(order["index"], order["sha256"], tuple(map(Path, order["places"])))

    def rows(self) -> dict[Key, Row] | None:
        """Its rollouts by prompt_id and sample_index, in canonical order; None if they are in none of its places.

        Raises InputError if one occurs twice, GateError if there are none.
        """
        for path in self.places:
            try:
                if digest_file(path) != self.sha256:
                    continue
                keyed = by_key(read_table(path, schemas.ROLLOUTS).to_pylist(), where=str(path))
            except FileNotFoundError:
                continue
            if not keyed:
                raise GateError(f"{path}: expected rollouts, found none")
            return {key: keyed[key] for key in sorted(keyed)}
        return None


def by_shard(
    job: Job,
    rollouts: ArtifactRef,
    context: Context,
    *,
    kind: str,
    schema: pa.Schema,
    make: Callable[[list[Row]], list[Row]],
) -> Iterator[tuple[list[Row], list[Row]]]:
    """Write this rank's file of `kind` for each shard of rollouts; yields those, and what was made of them.

    make: what becomes of a shard's rollouts, which come in canonical order. It is called on all ranks of the job or,
    where an earlier attempt has finished the shard on all of them, on none. Raises DamagedArtifact; TransientError
    where the one shard that is asked for is not there as it was.
    """
    shards = shards_of(job.store, rollouts) if context.shard is None else [context.shard]
    stand_alone = context.shard is not None or len(shards) > 1
    earlier, ranks = earlier_attempts(context.out), job.compute.ranks
    seen: set[Key] = set()
    for shard in shards:
        keyed = shard.rows()
        if keyed is None and context.shard is not None:
            raise TransientError(f"expected rollouts with sha256 {shard.sha256[:16]}… in {shard.places[0]}, found none")
        if keyed is None:
            raise damaged(rollouts, shard.places[0], f"expected sha256 {shard.sha256[:16]}…, found another")
        if twice := seen & keyed.keys():
            raise InputError(f"{shard.places[0]}: row {min(twice)} occurs twice; expected each rollout in one file")
        seen |= keyed.keys()
        rows = list(keyed.values())
        made_from = digest_of_inputs(job, rollouts, shard)
        paths = [layout.shard(context.out, kind, shard.index * ranks + rank) for rank in range(ranks)]
        own = paths[context.rank]
        if all(find_sealed(path.name, attempts=earlier, made_from=made_from) for path in paths):
            mark = adopt(own, earlier=earlier, made_from=made_from)
            assert mark is not None, "it was found just now, and nobody else is at work here"
            context.add_count(mark.figures)
            yield rows, read_table(own, schema).to_pylist()
            continue
        before = context.take_count()
        seed_libraries(seed_at(job.seed, job.STAGE, shard.index))  # whatever was made before it, and whenever
        results = make(rows)
        write_table(own, results, schema)
        figures = context.take_count()
        if stand_alone:
            seal(own, made_from=made_from, figures=figures)
        context.add_count(before)
        context.add_count(figures)
        yield rows, results


def digest_of_inputs(job: Job, rollouts: ArtifactRef, shard: RolloutShard) -> str:
    """One digest over what a job makes of a shard is made from: the shard, and what the job's other inputs hold."""
    return digest_bytes(canonical_json([shard.sha256, content_of_inputs(job, besides=rollouts)]))


def shards_of(store: Path, rollouts: ArtifactRef) -> list[RolloutShard]:
    """The shards of committed rollouts. Raises InputError if there is none, DamagedArtifact."""
    directory = open_artifact(store, rollouts)
    manifest = read_manifest(store, rollouts)
    assert manifest is not None, "it was opened just now"
    names = sorted(path.name for path in directory.glob(f"{ROLLOUTS}-?????.arrow"))
    if not names:
        raise InputError(f"{directory}: expected {ROLLOUTS}-00000.arrow and so on, found none")
    return [RolloutShard(i, manifest.files[name].sha256, (directory / name,)) for i, name in enumerate(names)]
