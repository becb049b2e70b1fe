"""Records -> clean, encoded rows of one role; what is empty or over-long is dropped and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from configs.sources import DataConfig
from stages.artifacts.errors import InputError
from stages.prepare_datasets.dialogues import BadRow
from stages.prepare_datasets.encoding import Encoder
from stages.prepare_datasets.records import Records
from stages.prepare_datasets.report import Tally
from stages.prepare_datasets.shapes import NEEDED, Record
from stages.prepare_datasets.splits import is_held_out, prompt_id_of
from stages.prepare_datasets.spool import Spool

_ROUND_TRIPS = 256
_ROWS_PER_WORD = 500


def clean(
    records: Records,
    spool: Spool,
    *,
    role: str,
    data: DataConfig,
    encoder: Encoder,
    tally: Tally,
    progress: Callable[[int, int], None],
) -> None:
    """Encode the records of a role into its spool, and close it.

    Raises InputError if none is left, GateError if the tokenizer does not give a text back.
    """
    every = max(1, records.count // _ROUND_TRIPS)
    for index, placed in enumerate(records.read()):
        if index % _ROWS_PER_WORD == 0:
            progress(index, records.count)
        try:
            fields = _encode(placed.record, role=role, data=data, encoder=encoder)
        except BadRow as error:
            tally.drop(error.reason, placed.place)
            continue
        if index % every == 0:
            _check_round_trip(fields, encoder, placed.place)
        held_out = is_held_out(placed.record.prompt.text, fraction=data.held_out_fraction)
        spool.add(fields, held_out=held_out, place=placed.place)
    progress(records.count, records.count)
    if not spool.rows:
        raise InputError(f"data.{role}: expected usable rows, found none of {tally.read}: {tally.reasons()}")
    spool.close(tally)


def _encode(record: Record, *, role: str, data: DataConfig, encoder: Encoder) -> dict[str, Any]:
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
    return {"prompt_id": prompt_id_of(prompt), "prompt": prompt, **parts, "prompt_ids": prompt_ids, **ids, **extra}


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


def _check_round_trip(fields: dict[str, Any], encoder: Encoder, place: str) -> None:
    for name, text in fields.items():
        if f"{name}_ids" in fields:
            encoder.check_round_trip(text, fields[f"{name}_ids"], place=place)
