"""Each known shape of rows, and the `columns` setting: what a row becomes in each role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.prepare_jobs import files, json_lines, prepare

N = 30


def _write(tmp_path: Path, make: Any, name: str = "a.jsonl") -> dict[str, Any]:
    path = tmp_path / name
    path.write_bytes(json_lines([make(i) for i in range(N)]))
    return files(path)


def _messages(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i}"}]}


SHAPES: list[tuple[str, Any, str, str, dict[str, str]]] = [
    (
        "messages",
        _messages,
        "demonstrations",
        "demonstrations",
        {"prompt": "<|user|>Q0<|end|><|assistant|>", "completion": "A0"},
    ),
    (
        "messages as prompts",
        _messages,
        "prompts",
        "prompts",
        {"prompt": "<|user|>Q0<|end|><|assistant|>", "answer": ""},
    ),
    (
        "turns",
        lambda i: {
            "turns": [
                {"speaker": "USER", "text": f"Q{i}"},
                {"speaker": "SYSTEM", "text": f"A{i}"},
                {"speaker": "USER", "text": "Bye"},
            ]
        },
        "demonstrations",
        "demonstrations",
        {"prompt": "<|user|>Q0<|end|><|assistant|>", "completion": "A0"},
    ),
    (
        "conversations",
        lambda i: {
            "conversations": [
                {"from": "system", "value": "Be"},
                {"from": "human", "value": f"Q{i}"},
                {"from": "gpt", "value": f"A{i}"},
            ]
        },
        "demonstrations",
        "demonstrations",
        {"prompt": "<|system|>Be<|end|><|user|>Q0<|end|><|assistant|>"},
    ),
    (
        "prompt with answer",
        lambda i: {"prompt": f"Q{i}", "answer": i},
        "prompts",
        "prompts",
        {"prompt": "Q0", "answer": "0"},
    ),
    (
        "question and answer",
        lambda i: {"question": f"Q{i}", "answer": f"So {i}.\n#### 1,00{i}"},
        "prompts",
        "prompts",
        {"prompt": "Q0", "answer": "1000"},
    ),
    (
        "solutions",
        lambda i: {"question": f"Q{i}", "answer": f"So {i}.\n#### {i}"},
        "demonstrations",
        "demonstrations",
        {"prompt": "Q0", "completion": "So 0.\n#### 0"},
    ),
    (
        "preference",
        lambda i: {"prompt": f"Q{i}", "chosen": "yes", "rejected": "no"},
        "preferences",
        "pairs",
        {"prompt": "Q0", "chosen": "yes", "rejected": "no"},
    ),
    (
        "preference of messages",
        lambda i: {
            "prompt": f"Q{i}",
            "messages": [],
            "chosen": [*_messages(i)["messages"]],
            "rejected": [_messages(i)["messages"][0], {"role": "assistant", "content": "?"}],
        },
        "preferences",
        "pairs",
        {"prompt": "<|user|>Q0<|end|><|assistant|>", "chosen": "A0", "rejected": "?"},
    ),
    (
        "pairs as prompts",
        lambda i: {"chosen": f"\n\nHuman: Q{i}\n\nAssistant: y", "rejected": f"\n\nHuman: Q{i}\n\nAssistant: n"},
        "prompts",
        "prompts",
        {"prompt": "\n\nHuman: Q0\n\nAssistant:"},
    ),
    (
        "transcripts",
        lambda i: {"chosen": f"\n\nHuman: Q{i}\n\nAssistant: yes", "rejected": f"\n\nHuman: Q{i}\n\nAssistant: yea"},
        "preferences",
        "pairs",
        {"prompt": "\n\nHuman: Q0\n\nAssistant:", "chosen": " yes", "rejected": " yea"},
    ),
    (
        "pandalm",
        lambda i: {
            "instruction": f"Do{i}",
            "input": "it",
            "response1": "a",
            "response2": "b",
            "annotator1": 2,
            "annotator2": 2,
            "annotator3": 1,
        },
        "preferences",
        "pairs",
        {"prompt": "Do0\n\nit", "chosen": "b", "rejected": "a"},
    ),
]


@pytest.mark.parametrize(("make", "role", "kind", "expected"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES])
def test_shape(tmp_path: Path, make: Any, role: str, kind: str, expected: dict[str, str]) -> None:
    sources: dict[str, Any] = {role: _write(tmp_path, make), "max_prompt_tokens": 200}
    prepared = prepare(tmp_path, **sources)
    rows = prepared.rows(kind)
    assert len(rows) == N
    assert any(expected.items() <= row.items() for row in rows), rows[0]


def test_columns_name_and_fill_fields(tmp_path: Path) -> None:
    source = _write(tmp_path, lambda i: {"Body": f"B{i}", "Question": "how?", "Answer": 51.0, "nums": [1, 2]})
    source["columns"] = {"prompt": "{Body} {{{nums}}} {Question}", "answer": "Answer"}
    rows = prepare(tmp_path, prompts=source).rows("prompts")
    assert ("B3 {[1, 2]} how?", "51") in {(row["prompt"], row["answer"]) for row in rows}


def test_columns_rename_message_keys(tmp_path: Path) -> None:
    source = _write(tmp_path, lambda i: {"talk": [{"who": "human", "said": f"Q{i}"}, {"who": "bot", "said": "A"}]})
    source["columns"] = {"messages": "talk", "role": "who", "content": "said"}
    rows = prepare(tmp_path, demonstrations=source).rows("demonstrations")
    assert {row["completion"] for row in rows} == {"A"} and len(rows) == N
