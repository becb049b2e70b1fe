"""What bench/store.py measures, each kind in a process of its own: formats against each other, and a million rows.

`python -m bench.store_work KIND DIRECTORY ROWS` prints its figures as one line of JSON, the last.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from configs.models import FromScratch
from configs.sources import DataConfig
from stages.artifacts import layout, store
from stages.artifacts.schemas import ROLLOUTS
from stages.artifacts.shards import read_table, write_table
from stages.job import Job

Row = dict[str, Any]
ROWS_PER_SHARD = 4096
_TEXTS = {"prompts": (), "demonstrations": ("completion",), "preferences": ("chosen", "rejected")}


class _Rollouts(Job):
    """Stands for generate_rollouts: the store does not look into files."""

    STAGE: ClassVar[str] = "generate_rollouts"
    VERSION: ClassVar[int] = 1
    content: str


def rollouts(rows: int, *, seed: int = 0) -> Iterator[Row]:
    """Made-up rollouts of 16 to 256 completion tokens, most of them short."""
    chance = random.Random(seed)
    ids = [chance.randrange(50_000) for _ in range(4096)]
    logprobs = [-chance.random() for _ in range(4096)]
    text = "".join(chance.choice("abcdefgh ") for _ in range(4096))
    for index in range(rows):
        length, start = min(256, 16 + int(chance.expovariate(1 / 40))), chance.randrange(3000)
        yield {
            "round_index": 0,
            "prompt_id": f"{index // 8:016x}",
            "sample_index": index % 8,
            "group_id": f"0/{index // 8:016x}",
            "policy_version": "0" * 32,
            "prompt_ids": ids[start : start + 24],
            "completion_ids": ids[start : start + length],
            "rollout_logprobs": logprobs[start : start + length],
            "finish_reason": "stop",
            "prompt": text[start : start + 80],
            "completion": text[start : start + 4 * length],
            "answer": "",
        }


def formats(directory: Path, rows: int) -> Row:
    """Write and read the same rollouts in three ways, files on the disk flushed each time, from the page cache read.

    Arrow is what the store does: hashes, flushes, manifest, and every hash compared again before reading. The other two
    are written and flushed, no more.
    """
    import torch

    found = list(rollouts(rows))
    job = _Rollouts(store=directory / "store", seed=0, content="formats")
    _commit(_Rollouts(store=directory / "store", seed=0, content="warm-up"), rollouts(8))
    lines, saved = directory / "rollouts.jsonl", directory / "rollouts.pt"

    def write_lines() -> None:
        with lines.open("w") as file:
            for row in found:
                file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def save() -> None:
        with saved.open("wb") as file:
            torch.save(found, file)
            file.flush()
            os.fsync(file.fileno())

    figures = {
        "arrow_write_seconds": _seconds(lambda: _commit(job, iter(found))),
        "json_lines_write_seconds": _seconds(write_lines),
        "torch_save_seconds": _seconds(save),
        "arrow_bytes": float(_bytes(job.ref.path(job.store))),
        "json_lines_bytes": float(lines.stat().st_size),
        "torch_bytes": float(saved.stat().st_size),
    }
    figures["arrow_verified_read_seconds"] = _seconds(lambda: _read(job, as_rows=False))
    for shard in job.ref.path(job.store).glob("*.arrow"):
        os.utime(shard)  # a file that has been touched is hashed again
    figures["arrow_verified_read_to_rows_seconds"] = _seconds(lambda: _read(job, as_rows=True))
    figures["json_lines_read_seconds"] = _seconds(lambda: [json.loads(line) for line in lines.open()])
    figures["torch_load_seconds"] = _seconds(lambda: torch.load(saved, weights_only=True))
    figures["arrow_verified_read_bytes_per_second"] = figures["arrow_bytes"] / figures["arrow_verified_read_seconds"]
    return figures


def many(directory: Path, rows: int) -> Row:
    """Write `rows` rollouts into one artifact, shard by shard, and read them back verified, shard by shard."""
    before = _largest_memory()
    job = _Rollouts(store=directory / "store", seed=0, content="many")
    figures = {"write_seconds": _seconds(lambda: _commit(job, rollouts(rows)))}
    figures["verified_read_seconds"] = _seconds(lambda: _read(job, as_rows=False))
    return figures | _memory(before) | {"bytes": float(_bytes(job.ref.path(job.store)))}


def prepare(directory: Path, rows: int, *, role: str = "prompts") -> Row:
    """prepare_datasets over `rows` distinct rows of a role, from JSON Lines to what it writes."""
    from stages.prepare_datasets import run as program
    from stages.prepare_datasets.digests import source_digests
    from stages.prepare_datasets.job import Parameters, PrepareDatasets
    from stages.program import Context

    directory.mkdir(exist_ok=True)
    source = directory / f"{role}.jsonl"
    with source.open("w") as file:
        for index in range(rows):
            legs = f"They have {8 * index} and {6 * (index % 97)}."
            texts = {"completion": legs, "chosen": legs, "rejected": "That is hard to say."}
            prompt = f"How many legs have {index} spiders and {index % 97} ants?"
            file.write(json.dumps({"prompt": prompt} | {name: texts[name] for name in _TEXTS[role]}) + "\n")
    columns = {name: name for name in ("prompt", *_TEXTS[role])}
    sources = {"prompts": {"kind": "sort_digits", "rows": 200}} | {
        role: {"kind": "files", "path": str(source), "columns": columns}
    }
    data = DataConfig.model_validate(sources)
    digests = source_digests(data, directory / "digests.json")
    parameters = Parameters(data=data, base=FromScratch(), digests=digests)
    job = PrepareDatasets(store=directory / "store", seed=0, parameters=parameters)
    before = _largest_memory()
    attempt = store.new_attempt(job)
    seconds = _seconds(lambda: program.run(job, Context(out=attempt)))
    store.commit(job, attempt, metrics={}, wall_seconds=seconds)
    return {"seconds": seconds} | _memory(before)


def _commit(job: Job, rows: Iterator[Row]) -> None:
    attempt = store.new_attempt(job)
    shard: list[Row] = []
    index = 0
    for row in rows:
        shard.append(row)
        if len(shard) == ROWS_PER_SHARD:
            write_table(layout.shard(attempt, "rollouts", index), shard, ROLLOUTS)
            shard, index = [], index + 1
    if shard:
        write_table(layout.shard(attempt, "rollouts", index), shard, ROLLOUTS)
    store.commit(job, attempt, metrics={}, wall_seconds=0.0)


def _read(job: Job, *, as_rows: bool) -> None:
    """Verify every file, then read every column of every shard."""
    directory = store.open_artifact(job.store, job.ref)
    for shard in sorted(directory.glob("rollouts-?????.arrow")):
        table = read_table(shard, ROLLOUTS)
        if as_rows:
            table.to_pylist()


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.arrow"))


def _largest_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory(before: int) -> Row:
    """before: of the process with its libraries loaded and nothing read yet."""
    return {"peak_rss_bytes": float(_largest_memory()), "peak_rss_before_bytes": float(before)}


_KINDS: dict[str, Callable[[Path, int], Row]] = {
    "formats": formats,
    "many": many,
    "prepare": prepare,
    "prepare_demonstrations": partial(prepare, role="demonstrations"),
    "prepare_preferences": partial(prepare, role="preferences"),
}

if __name__ == "__main__":
    kind, place, count = sys.argv[1:]
    print(json.dumps(_KINDS[kind](Path(place), int(count))))
