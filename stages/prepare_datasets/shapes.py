"""Rows -> records: which of the known shapes the columns have, and what a row of that shape says.

Knows no tokenizer and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.sources import FileSource
from stages.artifacts.errors import InputError
from stages.prepare_datasets.columns import Field, text_of
from stages.prepare_datasets.dialogues import (
    BadRow,
    Prompt,
    Turn,
    read_turns,
    split_last_reply,
    split_transcripts,
)

Fields = Mapping[str, Any]

NEEDED: dict[str, tuple[str, ...]] = {
    "prompts": (),
    "demonstrations": ("completion",),
    "preferences": ("chosen", "rejected"),
}
"""What a record must have besides a prompt, by role."""

_SHAPES = (
    "messages | turns | conversations; prompt (+ completion, answer); prompt + chosen + rejected; "
    "chosen + rejected; question + answer; instruction + response1 + response2 + annotator1"
)
_LISTS = ("messages", "turns", "conversations")


@dataclass(frozen=True)
class Record:
    """What a row says, whatever its shape was. Parts that a shape does not have are None; answer is then empty."""

    prompt: Prompt
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    answer: str = ""


Parser = Callable[[Fields], Record]


def parser_for(source: FileSource, columns: list[str], *, role: str, where: str) -> Parser:
    """How rows with these columns are read for a role. Raises InputError where they do not fit it."""
    shape: str = "columns" if source.columns else source.shape
    if shape == "auto":
        shape = _shape_of(columns, role=role, where=where)
    if shape == "columns":
        fields: dict[str, Field] = {
            name: Field(name, spec, known=columns, where=where)
            for name, spec in source.columns.items()
            if name not in ("role", "content")
        }
        has: set[str] = set(fields)
        if not fields:
            raise InputError(f"data.{role}.columns: expected what prompt is made of, found nothing")
        if not has & {"prompt", "messages"} and has != {"chosen", "rejected"}:
            raise InputError(f"data.{role}.columns: expected prompt or messages, found {sorted(has)}")
        parse: Parser = _columns_parser(fields, source.columns.get("role", ""), source.columns.get("content", ""))
    else:
        _require(shape, columns, role=role, where=where)
        parse = _PARSERS[shape]
        has = _gives(shape, columns)
    if "messages" in has:
        has = has | {"completion"}
    if not set(NEEDED[role]) <= has:
        raise InputError(
            f"{where}: expected {role} (prompt, {', '.join(NEEDED[role])}), found columns {columns} "
            f"(shape {shape}); say what they mean in data.{role}.columns"
        )
    return parse


def final_answer(text: str) -> str:
    """The reference of a solution: what follows the last `####`, without commas; else all of it."""
    _, mark, last = text.rpartition("####")
    return last.replace(",", "").strip() if mark else text.strip()


def _shape_of(columns: list[str], *, role: str, where: str) -> str:
    has = set(columns)
    if {"chosen", "rejected"} <= has and (role == "preferences" or not has & set(_LISTS)):
        return "preference" if "prompt" in has else "transcript_pair"
    if {"instruction", "response1", "response2"} <= has and any(c.startswith("annotator") for c in has):
        return "pandalm"
    if has & set(_LISTS):
        return "messages"
    if "prompt" in has:
        return "prompt_completion"
    if {"question", "answer"} <= has:
        return "question_answer"
    raise InputError(
        f"{where}: expected columns of a known shape ({_SHAPES}), found {columns}; "
        f"say what they mean in data.{role}.columns"
    )


_COLUMNS = {
    "prompt_completion": ("prompt",),
    "preference": ("prompt", "chosen", "rejected"),
    "transcript_pair": ("chosen", "rejected"),
    "question_answer": ("question", "answer"),
    "pandalm": ("instruction", "response1", "response2"),
}


def _require(shape: str, columns: list[str], *, role: str, where: str) -> None:
    missing = [name for name in _COLUMNS.get(shape, ()) if name not in columns]
    if shape == "messages" and not set(_LISTS) & set(columns):
        missing = ["messages"]
    if shape == "pandalm" and not any(c.startswith("annotator") for c in columns):
        missing.append("annotator1")
    if missing:
        raise InputError(f"{where}: shape {shape} of data.{role}: expected columns {missing}, found {columns}")


def _gives(shape: str, columns: list[str]) -> set[str]:
    if shape in ("preference", "transcript_pair", "pandalm"):
        return {"chosen", "rejected"}
    if shape == "prompt_completion":
        return {"completion"} & set(columns)
    return {"completion"}


def _messages(fields: Fields) -> Record:
    name = next((n for n in _LISTS if fields.get(n) is not None), _LISTS[0])
    return _of_turns(read_turns(fields.get(name), system_answers=name == "turns"), fields)


def _of_turns(turns: tuple[Turn, ...], fields: Fields) -> Record:
    before, reply = split_last_reply(turns)
    return Record(Prompt.of_turns(before), completion=reply, answer=_answer(fields.get("answer")))


def _prompt_completion(fields: Fields) -> Record:
    completion = fields.get("completion")
    return Record(
        _prompt(fields.get("prompt")),
        completion=None if "completion" not in fields else _reply(completion, field="completion"),
        answer=_answer(fields.get("answer")),
    )


def _preference(fields: Fields) -> Record:
    chosen, rejected = fields.get("chosen"), fields.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list):
        better, worse = split_last_reply(read_turns(chosen)), split_last_reply(read_turns(rejected))
        if better[0] != worse[0]:
            raise BadRow("chosen and rejected have different prompts")
        prompt = Prompt.of_turns(better[0]) if better[0] else _prompt(fields.get("prompt"))
        return Record(prompt, chosen=better[1] or "", rejected=worse[1] or "")
    return Record(
        _prompt(fields.get("prompt")),
        chosen=_string(chosen, field="chosen"),
        rejected=_string(rejected, field="rejected"),
        answer=_answer(fields.get("answer")),
    )


def _transcript_pair(fields: Fields) -> Record:
    if isinstance(fields.get("chosen"), list):
        return _preference(fields)
    prompt, chosen, rejected = split_transcripts(
        _string(fields.get("chosen"), field="chosen"), _string(fields.get("rejected"), field="rejected")
    )
    return Record(Prompt.of_text(prompt), chosen=chosen, rejected=rejected)


def _question_answer(fields: Fields) -> Record:
    solution = text_of(fields.get("answer"), field="answer")
    question = _string(fields.get("question"), field="question")
    return Record(Prompt.of_text(question), completion=solution, answer=final_answer(solution))


def _pandalm(fields: Fields) -> Record:
    responses = [_string(fields.get(name), field="response") for name in ("response1", "response2")]
    votes = [str(value) for name, value in sorted(fields.items()) if name.startswith("annotator")]
    first, second = votes.count("1"), votes.count("2")
    if not votes or set(votes) - {"0", "1", "2"}:
        raise BadRow("expected the annotators to say 0, 1 or 2", ascii(votes)[:60])
    instruction = _string(fields.get("instruction"), field="instruction")
    extra = _string(fields.get("input") or "", field="input")
    prompt = Prompt.of_text(f"{instruction}\n\n{extra}" if extra.strip() else instruction)
    if max(first, second) * 2 <= len(votes):
        raise Tie("no majority among the annotators")
    chosen, rejected = responses if first > second else reversed(responses)
    return Record(prompt, chosen=chosen, rejected=rejected)


class Tie(BadRow):
    """A pair without a winner: dropped and counted, and no sign of a bad file."""


def _columns_parser(fields: dict[str, Field], role_key: str, content_key: str) -> Parser:
    def parse(row: Fields) -> Record:
        values = {name: field.value(row) for name, field in fields.items()}
        if "messages" in values:
            turns = read_turns(values["messages"], role_key=role_key, content_key=content_key)
            return _of_turns(turns, values)
        if "chosen" in values and "rejected" in values:
            return _preference(values) if "prompt" in values else _transcript_pair(values)
        return _prompt_completion(values)

    return parse


def _prompt(value: Any) -> Prompt:
    if isinstance(value, list):
        return Prompt.of_turns(read_turns(value))
    return Prompt.of_text(_string(value, field="prompt"))


def _reply(value: Any, *, field: str) -> str:
    if isinstance(value, list):
        return split_last_reply(read_turns(value))[1] or ""
    return text_of(value, field=field)


def _string(value: Any, *, field: str) -> str:
    if isinstance(value, str):
        return value
    raise BadRow(f"expected a string as {field}", "null" if value is None else ascii(value)[:60])


def _answer(value: Any) -> str:
    return "" if value is None else final_answer(text_of(value, field="answer"))


_PARSERS: dict[str, Parser] = {
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "transcript_pair": _transcript_pair,
    "question_answer": _question_answer,
    "pandalm": _pandalm,
}
