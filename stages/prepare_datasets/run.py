"""The program of prepare_datasets: read -> tokenizer -> clean and encode -> split -> write, with a report."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.artifacts import schemas
from stages.artifacts.durable import write_json
from stages.artifacts.errors import InputError
from stages.artifacts.shards import table_writer
from stages.prepare_datasets.digests import check_digests
from stages.prepare_datasets.job import PrepareDatasets
from stages.prepare_datasets.records import ROLES, Records, find_records, sample_texts
from stages.prepare_datasets.report import Tally, role_report
from stages.prepare_datasets.shapes import NEEDED
from stages.prepare_datasets.splits import settled
from stages.program import Context

if TYPE_CHECKING:
    from stages.prepare_datasets.spool import Spool

_KIND = {"prompts": "prompts", "demonstrations": "demonstrations", "preferences": "pairs"}
_NEEDED = {
    ("prompts", "train"),
    ("prompts", "held_out"),
    ("demonstrations", "train"),
    ("pairs", "train"),
    ("pairs", "held_out"),
}


def run(job: PrepareDatasets, context: Context) -> dict[str, float]:
    """Write tokenizer/, the Arrow files and report.json. Raises InputError or GateError before anything is written.

    Metrics: `<kind>_<part>_rows` and `<kind>_dropped_rows`, in rows. Memory does not grow with the rows' texts: sources
    are read again for each look at them, and encoded rows lie in a spool beside the output until they are in order.
    """
    data, base = job.parameters.data, job.parameters.base
    check_digests(data, job.parameters.digests)
    tallies = {role: Tally() for role in ROLES}
    found: dict[str, Records] = {}
    for index, role in enumerate(ROLES):
        told = partial(context.progress, f"rows of {role} looked at", total=0)
        records = find_records(data, role=role, run_seed=job.seed, tally=tallies[role], progress=told)
        if records is not None:
            found[role] = records
        context.progress("sources read", index + 1, len(ROLES))

    # transformers takes seconds to import: bad data is refused before that
    from stages.prepare_datasets.cleaning import clean
    from stages.prepare_datasets.encoding import Encoder
    from stages.prepare_datasets.spool import Spool
    from stages.prepare_datasets.tokenizer import make_tokenizer

    tokenizer = make_tokenizer(base, texts=sample_texts(found.values()) if base.kind == "from_scratch" else [])
    encoder = Encoder(tokenizer, chat=data.chat)
    with ExitStack() as stack:
        spools: dict[str, Spool] = {}
        for role, records in found.items():
            directory, texts = context.out / f".spool-{role}", ("prompt", *NEEDED[role])
            spools[role] = stack.enter_context(Spool(directory, schemas.ALL[_KIND[role]], texts=texts))
            told = partial(context.progress, f"{role} encoded")
            clean(records, spools[role], role=role, data=data, encoder=encoder, tally=tallies[role], progress=told)
        check_digests(data, job.parameters.digests)
        splits = _write(spools, context.out, held_out_fraction=data.held_out_fraction)
        tokens = {role: spool.lengths() for role, spool in spools.items()}
    tokenizer.save_pretrained(str(context.out / "tokenizer"))
    report: dict[str, Any] = {
        _KIND[role]: role_report(tallies[role], tokens[role], split) for role, split in splits.items()
    }
    report["tokenizer"] = {
        "entries": len(tokenizer),
        "bos": tokenizer.bos_token,
        "eos": tokenizer.eos_token,
        "pad": tokenizer.pad_token,
        "adds_bos": encoder.adds_bos,
        "chat_template": bool(tokenizer.chat_template),
        "trained_here": base.kind == "from_scratch",
    }
    write_json(context.out / "report.json", report)
    metrics = {f"{_KIND[role]}_{part}_rows": float(n) for role, split in splits.items() for part, n in split.items()}
    return metrics | {f"{_KIND[role]}_dropped_rows": float(tallies[role].dropped) for role in splits}


def _write(spools: Mapping[str, Spool], out: Path, *, held_out_fraction: float) -> dict[str, dict[str, int]]:
    """Write every role's parts. Returns their rows, by role and part. Raises InputError before writing anything."""
    held_out = settled([spool.assigned() for spool in spools.values()])
    splits: dict[str, dict[str, int]] = {}
    for role, spool in spools.items():
        numbers, _ = spool.assigned()
        count = int(np.isin(numbers, held_out).sum())
        splits[role] = {"train": len(numbers) - count, "held_out": count}
        for part, rows in splits[role].items():
            if not rows and (_KIND[role], part) in _NEEDED:
                raise InputError(
                    f"data.{role}: expected rows in the part {part}, found none of {len(numbers)} there "
                    f"(held_out_fraction {held_out_fraction}); give more rows, or change held_out_fraction"
                )
    for role, spool in spools.items():
        schema = schemas.ALL[_KIND[role]]
        train, held = (out / f"{_KIND[role]}_{part}-00000.arrow" for part in ("train", "held_out"))
        with table_writer(train, schema) as write_train, table_writer(held, schema) as write_held:
            for for_training, for_evaluation in spool.in_order(held_out):
                write_train(for_training)
                write_held(for_evaluation)
    return splits


if __name__ == "__main__":
    from stages.program import main

    main("prepare_datasets")
