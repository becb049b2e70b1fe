"""A table of malformed and odd input files, each with what must come of it: refused in these words, or read."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts.errors import InputError
from tests.unit.prepare_files import (
    GOOD,
    arrow_file,
    csv_file,
    folder,
    loop,
    mixed_folder,
    mixed_kinds_folder,
    one_more,
    parquet_file,
    stream_cut_between_batches,
)
from tests.unit.prepare_jobs import files, json_lines, prepare

Make = bytes | Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """content: of the file `name`, or what makes it. refused: words of the message; else rows kept and dropped."""

    id: str
    name: str
    content: Make
    refused: tuple[str, ...] = ()
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def _preference(chosen: str, rejected: str) -> bytes:
    pairs = [
        {"chosen": f"\n\nHuman: Say {i}\n\nAssistant: Yes {i}", "rejected": f"\n\nHuman: Say {i}\n\nAssistant: No {i}"}
        for i in range(40)
    ]
    return json_lines([*pairs, {"chosen": chosen, "rejected": rejected}])


BOMB = gzip.compress(b'{"prompt": "' + b"a" * 2**20 + b'", "completion": "b"}\n', mtime=0) * 64
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BAD_COMPLETION = "expected a string as completion"
PAIRS = {"role": "preferences"}
# A column that nothing asks for is read past, whatever stands in it.
rewarded = [{**row, "reward": (float("nan"), "good", 1)[i % 3]} for i, row in enumerate(GOOD)]
as_expected: list[str] = []

CASES = [
    # refused as a file
    Case("empty file", "a.jsonl", b"", ("a.jsonl", "expected rows", "an empty file")),
    Case("blank lines only", "a.jsonl", b"\n  \n\r\n", ("a.jsonl", "expected rows", "found none")),
    Case("blank json", "a.json", b" \n", ("a.json", "expected rows")),
    Case("empty gzip", "a.jsonl.gz", gzip.compress(b""), ("expected rows", "found none")),
    Case("lfs pointer", "a.jsonl", LFS, ("expected JSON Lines", "a git-LFS pointer", "git lfs pull")),
    Case("lfs pointer as parquet", "a.parquet", LFS, ("expected Parquet", "a git-LFS pointer")),
    Case("html page", "a.json", b"<!DOCTYPE html><html><body>Sign in</body></html>", ("expected JSON", "an HTML page")),
    Case("utf-16 with mark", "a.jsonl", json_lines(GOOD).decode().encode("utf-16"), ("UTF-16", "iconv")),
    Case("utf-16 without mark", "a.jsonl", json_lines(GOOD).decode().encode("utf-16-le"), ("UTF-16", "iconv")),
    Case("latin-1", "a.jsonl", one_more(GOOD[0])[:-1] + b'\n{"prompt": "caf\xe9"}\n', ("a.jsonl:42", "UTF-8", "0xe9")),
    Case("latin-1 csv", "a.csv", csv_file().replace(b"Answer 7", b"Caf\xe9 7"), ("a.csv", "UTF-8", "0xe9")),
    Case("parquet named jsonl", "a.jsonl", parquet_file(), ("expected JSON Lines", "found Parquet")),
    Case("jsonl named parquet", "a.parquet", json_lines(GOOD), ("expected Parquet", "found JSON Lines")),
    Case("array named jsonl", "a.jsonl", json.dumps(GOOD).encode(), ("expected JSON Lines", "found JSON")),
    Case("gzip without gz", "a.jsonl", gzip.compress(json_lines(GOOD)), ("expected JSON Lines", "found gzip")),
    Case("gz without gzip", "a.jsonl.gz", json_lines(GOOD), ("expected gzip", "found JSON Lines")),
    Case("zip", "a.jsonl", b"PK\x03\x04" + b"\0" * 30, ("expected JSON Lines", "a zip archive", "unpack")),
    Case("pickle", "a.json", b"\x80\x04\x95\x10\x00\x00\x00.", ("expected JSON", "a pickle")),
    Case("plain text", "a.txt", b"Once upon a time\n", ("a.txt", "no known kind")),
    Case("cut gzip", "a.jsonl.gz", gzip.compress(json_lines(GOOD))[:-20], ("a.jsonl.gz", "cut or damaged")),
    Case("gzip bomb", "a.jsonl.gz", BOMB, ("a.jsonl.gz", "gzip bomb")),
    Case("cut parquet", "a.parquet", parquet_file()[:-30], ("expected Parquet", "was cut")),
    Case("damaged parquet", "a.parquet", b"PAR1" + b"\7" * 400 + b"PAR1", ("expected Parquet", "damaged")),
    Case("cut arrow", "a.arrow", arrow_file()[:-60], ("expected Arrow", "damaged")),
    Case("cut arrow stream", "a.arrow", stream_cut_between_batches(), ("expected Arrow", "was cut")),
    Case("gzipped parquet", "a.parquet.gz", gzip.compress(parquet_file()), ("expected Parquet", "gunzip")),
    # refused for where it is
    Case("missing path", "a.jsonl", lambda path: None, ("a.jsonl", "no such file or folder", "hub: true")),
    Case("empty folder", "a", lambda path: path.mkdir(), ("expected a .jsonl", "found nothing")),
    Case("empty folder named jsonl", "a.jsonl", lambda path: path.mkdir(), ("expected a .jsonl", "found nothing")),
    Case("link to itself", "a.jsonl", loop, ("a.jsonl", "link")),
    Case("pipe", "a.jsonl", os.mkfifo, ("a.jsonl", "a pipe")),
    Case("glob without match", "*.parquet", lambda path: None, ("*.parquet", "found none")),
    # refused for a row
    Case("cut last line", "a.jsonl", json_lines(GOOD)[:-9], ("a.jsonl:40", "one JSON object per line", "cut")),
    Case("broken line", "a.jsonl", json_lines(GOOD).replace(b'"Question 6?"', b"Question"), ("a.jsonl:7",)),
    Case("array as a row", "a.jsonl", one_more([1, 2]), ("a.jsonl:3", "expected a JSON object", "an array")),
    Case("duplicate keys", "a.jsonl", b'{"prompt": "a", "prompt": "b"}\n', ("a.jsonl:1", "duplicate key 'prompt'")),
    Case("raw NUL bytes", "a.jsonl", json_lines(GOOD).replace(b"Answer 3.", b"\0"), ("a.jsonl:4", "JSON object")),
    Case("deep nesting", "a.jsonl", b'{"prompt": ' + b"[" * 200_000 + b"\n", ("a.jsonl:1", "nested too deeply")),
    Case("deep json", "a.json", b"[" * 200_000, ("a.json", "nested too deeply")),
    Case("broken json array", "a.json", json.dumps(GOOD).encode()[:-5], ("a.json", "broken JSON", "line 1")),
    Case("json scalar", "a.json", b"42", ("a.json", "expected a JSON array", "a number")),
    Case("json object, no array", "a.json", b'{"prompt": "a"}', ("a.json", "expected a JSON array", "prompt")),
    Case("json object, two arrays", "a.json", b'{"a": [{}], "b": [{}]}', ("'a', 'b'", "split")),
    Case("json array of strings", "a.json", b'["a", "b"]', ("a.json: row 1", "named columns", "a string")),
    Case("ragged csv", "a.csv", csv_file("one,two,three\n"), ("a.csv:42", "expected 2 values", "found 3")),
    Case("csv header twice", "a.csv", b"prompt,prompt\na,b\n", ("a.csv:1", "distinct column names", "'prompt'")),
    Case("csv without rows", "a.csv", b"prompt,completion\n", ("expected rows", "found none")),
    # refused for its columns
    Case("renamed keys", "a.jsonl", json_lines([{"q": "a", "a": "b"}] * 3), ("known shape", "['q', 'a']", "columns")),
    Case("missing key", "a.jsonl", json_lines([{"prompt": "a"}] * 3), ("completion", "['prompt']", "columns")),
    Case(
        "all null", "a.jsonl", json_lines([{**r, "completion": None} for r in GOOD]), ("a.jsonl:1", "null", "40 of 40")
    ),
    Case("wrong types", "a.jsonl", json_lines([{**r, "prompt": {"x": 1}} for r in GOOD]), ("a.jsonl:1", "a string")),
    Case("mixed schemas", "a.jsonl", json_lines([*GOOD, {"prompt": 3}, *[{"q": "x"}] * 9]), ("a.jsonl:41", "10 of 50")),
    Case("mixed folder", "a", mixed_folder, ("b.jsonl:1", "20 of 40", "text")),
    Case(
        "one row",
        "a.jsonl",
        json_lines(GOOD[:1]),
        ("expected rows in the part", "held_out_fraction"),
        more={"role": "prompts"},
    ),
    Case(
        "unknown column",
        "a.jsonl",
        json_lines(GOOD),
        ("columns.prompt", "'Body'", "['prompt', 'completion']"),
        more={"columns": {"prompt": "{Body}"}},
    ),
    Case(
        "attribute in a template",
        "a.jsonl",
        json_lines(GOOD),
        ("columns.prompt", "prompt.__class__"),
        more={"columns": {"prompt": "{prompt.__class__}"}},
    ),
    Case(
        "width in a template",
        "a.jsonl",
        json_lines(GOOD),
        ("columns.prompt", "plain {column}"),
        more={"columns": {"prompt": "{prompt:>999999999}"}},
    ),
    Case(
        "broken template",
        "a.jsonl",
        json_lines(GOOD),
        ("columns.prompt", "not a template"),
        more={"columns": {"prompt": "{prompt"}},
    ),
    # read, with what was dropped
    Case("byte order mark", "a.jsonl", b"\xef\xbb\xbf" + json_lines(GOOD), kept=40),
    Case("byte order mark csv", "a.csv", b"\xef\xbb\xbf" + csv_file(), kept=40),
    Case("windows line ends", "a.jsonl", json_lines(GOOD).replace(b"\n", b"\r\n"), kept=40),
    Case("blank lines between", "a.jsonl", json_lines(GOOD).replace(b"\n", b"\n\n"), kept=40),
    Case("no last line end", "a.jsonl", json_lines(GOOD)[:-1], kept=40),
    Case("json lines named json", "a.json", json_lines(GOOD), kept=40),
    Case("json object holding an array", "a.json", json.dumps({"version": 1, "data": GOOD}).encode(), kept=40),
    Case("json object of splits", "a.json", json.dumps({"test": GOOD[:5], "train": GOOD}).encode(), kept=40),
    Case("gzipped json", "a.json.gz", gzip.compress(json.dumps(GOOD).encode()), kept=40),
    Case("gzipped csv", "a.csv.gz", gzip.compress(csv_file()), kept=40),
    Case("upper-case suffix", "A.JSONL", json_lines(GOOD), kept=40),
    Case("parquet", "a.parquet", parquet_file(), kept=40),
    Case("odd name", "a [1] {x}*.parquet", parquet_file(), kept=40),
    Case("arrow file", "a.arrow", arrow_file(), kept=40),
    Case("arrow stream", "a.arrow", arrow_file(stream=True, batches=4), kept=40),
    Case("folder named jsonl", "a.jsonl", folder, kept=40),
    Case("folder of two kinds", "a", mixed_kinds_folder, kept=40),
    Case("csv with quoted line ends", "a.csv", csv_file('"one, two","three\nfour"\n'), kept=41),
    Case("one null", "a.jsonl", one_more({"prompt": "a", "completion": None}), kept=40, dropped={BAD_COMPLETION: 1}),
    Case("one missing key", "a.jsonl", one_more({"prompt": "a"}), kept=40, dropped={"expected a completion": 1}),
    Case(
        "one of wrong type",
        "a.jsonl",
        one_more({"prompt": "a", "completion": True}),
        kept=40,
        dropped={BAD_COMPLETION: 1},
    ),
    Case("NaN", "a.jsonl", one_more({"prompt": "a", "completion": float("nan")}), kept=40, dropped={BAD_COMPLETION: 1}),
    Case("empty prompt", "a.jsonl", one_more({"prompt": " ", "completion": "b"}), kept=40, dropped={"empty prompt": 1}),
    Case(
        "empty completion",
        "a.jsonl",
        one_more({"prompt": "a", "completion": ""}),
        kept=40,
        dropped={"empty completion": 1},
    ),
    Case("duplicates", "a.jsonl", json_lines(GOOD + GOOD[:7]), kept=40, dropped={"duplicate": 7}),
    Case(
        "huge prompt",
        "a.jsonl",
        one_more({"prompt": "x" * 2_000_000, "completion": "b"}),
        kept=40,
        dropped={"prompt over max_prompt_tokens": 1},
    ),
    Case(
        "long completion",
        "a.jsonl",
        one_more({"prompt": "a", "completion": "q z" * 200}),
        kept=40,
        dropped={"completion over max_completion_tokens": 1},
    ),
    Case(
        "lone surrogate",
        "a.jsonl",
        one_more({"prompt": "\ud800", "completion": "b"}),
        kept=40,
        dropped={"expected valid Unicode": 1},
    ),
    Case("same id twice", "a.jsonl", json_lines([{**row, "id": i // 2} for i, row in enumerate(GOOD)]), kept=40),
    Case("NaN, text and constants as rewards", "a.jsonl", json_lines(rewarded), kept=40),
    Case("escaped NUL", "a.jsonl", one_more({"prompt": "a\0b", "completion": "c"}), kept=41),
    Case(
        "special tokens in text", "a.jsonl", one_more({"prompt": "<bos><eos>", "completion": "a<eos><|user|>"}), kept=41
    ),
    Case(
        "chosen equals rejected",
        "a.jsonl",
        _preference("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: b"),
        kept=40,
        dropped={"chosen equals rejected": 1},
        more=PAIRS,
    ),
    Case(
        "different prompts",
        "a.jsonl",
        _preference("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: c\n\nAssistant: d"),
        kept=40,
        dropped={"chosen and rejected have different prompts": 1},
        more=PAIRS,
    ),
    Case(
        "different earlier turns",
        "a.jsonl",
        _preference(
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
            "\n\nHuman: a\n\nAssistant: x\n\nHuman: c\n\nAssistant: d",
        ),
        kept=40,
        dropped={"chosen and rejected differ before their last replies": 1},
        more=PAIRS,
    ),
    Case(
        "empty reply",
        "a.jsonl",
        _preference("\n\nHuman: a\n\nAssistant:", "\n\nHuman: a\n\nAssistant: d"),
        kept=40,
        dropped={"empty chosen": 1},
        more=PAIRS,
    ),
]


@pytest.fixture(scope="module", autouse=True)
def figures() -> Iterator[None]:
    yield
    refused = sum(bool(case.refused) for case in CASES if case.id in as_expected)
    print(f"\nR17: {len(as_expected)} of {len(CASES)} odd inputs as expected, {refused} of them refused by name")


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_odd_input(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "data" / case.name
    path.parent.mkdir()
    if callable(case.content):
        case.content(path)
    else:
        path.write_bytes(case.content)
    more = dict(case.more)
    role = more.pop("role", "demonstrations")
    sources: dict[str, Any] = {role: files(path, **more)}
    if not case.refused:
        prepared = prepare(tmp_path, **sources)
        kind = "pairs" if role == "preferences" else role
        assert (len(prepared.rows(kind)), prepared.dropped(kind)) == (case.kept, case.dropped)
        as_expected.append(case.id)
        return
    with pytest.raises(InputError) as refused:
        prepare(tmp_path, **sources)
    message = str(refused.value)
    assert all(word in message for word in case.refused), message
    assert len(message) < 900 and "\n" not in message
    assert not list(tmp_path.glob("out*/*")), "a refusal leaves nothing behind"
    as_expected.append(case.id)
