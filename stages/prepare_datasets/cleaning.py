"""Records -> clean, encoded rows of one role; what is empty, double or over-long is dropped and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from configs.sources import DataConfig
from stages.artifacts.errors import InputError
from stages.prepare_datasets.dialogues import BadRow
from stages.prepare_datasets.encoding import Encoder
from stages.prepare_datasets.records import Placed
from stages.prepare_datasets.report import Tally
from stages.prepare_datasets.shapes import NEEDED, Record
from stages.prepare_datasets.splits import is_held_out, prompt_id_of

_ROUND_TRIPS = 256


@dataclass(frozen=True)
class CleanRow:
    """One row as it is written, and whether the hash of its prompt holds it out."""

    fields: dict[str, Any]
    held_out: bool


def clean(
    records: Sequence[Placed],
    *,
    role: str,
    data: DataConfig,
    encoder: Encoder,
    tally: Tally,
    progress: Callable[[int, int], None],
) -> list[CleanRow]:
    """The rows of a role, in canonical order: by prompt_id, then by text.

    Raises InputError if none is left, GateError if the tokenizer does not give a text back.
    """
    rows: list[CleanRow] = []
    seen: dict[tuple[str, ...], str] = {}
    every = max(1, len(records) // _ROUND_TRIPS)
    for index, placed in enumerate(records):
        if index % 500 == 0:
            progress(index, len(records))
        try:
            row = _encode(placed.record, role=role, data=data, encoder=encoder)
            _refuse_double(row.fields, role=role, seen=seen)
        except BadRow as error:
            tally.drop(error.reason, placed.place)
            continue
        if index % every == 0:
            _check_round_trip(row.fields, encoder, placed.place)
        rows.append(row)
    progress(len(records), len(records))
    tally.kept = len(rows)
    if not rows:
        raise InputError(f"data.{role}: expected usable rows, found none of {tally.read}: {tally.reasons()}")
    texts = ("prompt", *NEEDED[role])
    return sorted(rows, key=lambda row: (row.fields["prompt_id"], *(row.fields[name] for name in texts)))


def _encode(record: Record, *, role: str, data: DataConfig, encoder: Encoder) -> CleanRow:
    if record.prompt.is_empty:
        raise BadRow("empty prompt")
    parts = {name: getattr(record, name) for name in NEEDED[role]}
    for name, text in parts.items():
        if text is None or not text.strip():
            raise BadRow(f"empty {name}")
        if encoder.surely_longer(text, max_tokens=data.max_completion_tokens):
            raise BadRow(f"{name} over max_completion_tokens")
    if role == "preferences" and record.chosen == record.rejected:
        raise BadRow("chosen equals rejected")
    prompt, prompt_ids = _encode_prompt(record, data=data, encoder=encoder)
    ids = {f"{name}_ids": encoder.encode_completion(text) for name, text in parts.items()}
    for name in parts:
        if len(ids[f"{name}_ids"]) > data.max_completion_tokens:
            raise BadRow(f"{name} over max_completion_tokens")
    extra = {"answer": record.answer} if role == "prompts" else {}
    fields = {"prompt_id": prompt_id_of(prompt), "prompt": prompt, **parts, "prompt_ids": prompt_ids, **ids, **extra}
    return CleanRow(fields, is_held_out(record.prompt.text, fraction=data.held_out_fraction))


def _encode_prompt(record: Record, *, data: DataConfig, encoder: Encoder) -> tuple[str, list[int]]:
    truncates = data.overlong == "truncate_left"
    if not truncates and encoder.surely_longer(record.prompt.text, max_tokens=data.max_prompt_tokens):
        raise BadRow("prompt over max_prompt_tokens")
    text, ids = encoder.encode_prompt(record.prompt)
    if len(ids) <= data.max_prompt_tokens:
        return text, ids
    if not truncates:
        raise BadRow("prompt over max_prompt_tokens")
    text, ids = encoder.truncate_left(ids, max_tokens=data.max_prompt_tokens)
    if not text.strip():
        raise BadRow("empty prompt after truncation")
    return text, ids


def _refuse_double(fields: dict[str, Any], *, role: str, seen: dict[tuple[str, ...], str]) -> None:
    key = tuple(fields[name] for name in ("prompt", *NEEDED[role]))
    answer = fields.get("answer", "")
    if key in seen:
        raise BadRow("duplicate" if seen[key] == answer else "same prompt with another answer")
    seen[key] = answer


def _check_round_trip(fields: dict[str, Any], encoder: Encoder, place: str) -> None:
    for name, text in fields.items():
        if f"{name}_ids" in fields:
            encoder.check_round_trip(text, fields[f"{name}_ids"], place=place)
