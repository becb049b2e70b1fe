"""The program of prepare_datasets: read -> tokenizer -> clean and encode -> split -> write, with a report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from stages.artifacts import schemas
from stages.artifacts.durable import write_json
from stages.artifacts.errors import InputError
from stages.artifacts.shards import write_table
from stages.prepare_datasets.digests import check_digests
from stages.prepare_datasets.job import PrepareDatasets
from stages.prepare_datasets.records import ROLES, Placed, read_records
from stages.prepare_datasets.report import Tally, role_report
from stages.program import Context

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

    Metrics: `<kind>_<part>_rows` and `<kind>_dropped_rows`, in rows.
    """
    data, base = job.parameters.data, job.parameters.base
    check_digests(data, job.parameters.digests)
    tallies = {role: Tally() for role in ROLES}
    records: dict[str, list[Placed]] = {}
    for index, role in enumerate(ROLES):
        found = read_records(data, role=role, run_seed=job.seed, tally=tallies[role])
        if found is not None:
            records[role] = found
        context.progress("sources read", index + 1, len(ROLES))

    # transformers takes seconds to import: bad data is refused before that
    from stages.prepare_datasets.cleaning import CleanRow, clean
    from stages.prepare_datasets.encoding import Encoder
    from stages.prepare_datasets.splits import settled
    from stages.prepare_datasets.tokenizer import make_tokenizer

    tokenizer = make_tokenizer(base, texts=_texts(records))
    encoder = Encoder(tokenizer, chat=data.chat)
    cleaned: dict[str, list[CleanRow]] = {}
    for role, placed in records.items():
        cleaned[role] = clean(
            placed,
            role=role,
            data=data,
            encoder=encoder,
            tally=tallies[role],
            progress=partial(context.progress, f"{role} encoded"),
        )
    held_out = settled([(row.fields["prompt_id"], row.held_out) for rows in cleaned.values() for row in rows])
    parts = {role: _part([row.fields for row in rows], held_out) for role, rows in cleaned.items()}
    metrics = _write(parts, tallies, context.out, held_out_fraction=data.held_out_fraction)
    tokenizer.save_pretrained(str(context.out / "tokenizer"))
    report: dict[str, Any] = {
        _KIND[role]: role_report(
            tallies[role],
            [r for rows in split.values() for r in rows],
            {part: len(rows) for part, rows in split.items()},
        )
        for role, split in parts.items()
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
    return metrics


def _texts(records: dict[str, list[Placed]]) -> list[str]:
    found = []
    for placed in records.values():
        for item in placed:
            record = item.record
            texts = (record.prompt.text, record.completion, record.chosen, record.rejected)
            found.append("\n".join(text for text in texts if text))
    return found


def _part(rows: list[dict[str, Any]], held_out: set[str]) -> dict[str, list[dict[str, Any]]]:
    return {
        "train": [row for row in rows if row["prompt_id"] not in held_out],
        "held_out": [row for row in rows if row["prompt_id"] in held_out],
    }


def _write(
    parts: dict[str, dict[str, list[dict[str, Any]]]], tallies: dict[str, Tally], out: Path, *, held_out_fraction: float
) -> dict[str, float]:
    for role, split in parts.items():
        for part, rows in split.items():
            if not rows and (_KIND[role], part) in _NEEDED:
                total = sum(len(r) for r in split.values())
                raise InputError(
                    f"data.{role}: expected rows in the part {part}, found none of {total} there "
                    f"(held_out_fraction {held_out_fraction}); give more rows, or change held_out_fraction"
                )
    metrics: dict[str, float] = {}
    for role, split in parts.items():
        for part, rows in split.items():
            write_table(out / f"{_KIND[role]}_{part}-00000.arrow", rows, schemas.ALL[_KIND[role]])
            metrics[f"{_KIND[role]}_{part}_rows"] = float(len(rows))
        metrics[f"{_KIND[role]}_dropped_rows"] = float(tallies[role].dropped)
    return metrics


if __name__ == "__main__":
    from stages.program import main

    main("prepare_datasets")
