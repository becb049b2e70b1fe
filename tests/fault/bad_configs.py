"""Sixty-odd ways to get a configuration wrong, each with the words that its refusal must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.contract.test_configs import REFUSED

RULE = "rewards=[{kind: function, function: '%s'}]"
VERIFIER = "rewards=[{kind: verifier, verifier: %s}]"
PAIR = "[{kind: verifier, verifier: length}, {kind: verifier, verifier: length}]"
HUGE = "model.base={kind: from_scratch, hidden: 16384, layers: 900, heads: 64, mlp: 65536, vocabulary: 200000}"


@dataclass(frozen=True)
class Bad:
    """overrides: given with --set; {dir} stands for a directory of the test's own. text: of the file, instead of the
    good one. words: key, value and what was expected. lines: of the refusal."""

    name: str
    overrides: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    text: str | bytes | None = None
    lines: int = 1
    prepare: Callable[[Path], object] = lambda directory: None


def _file(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text("x\n")


def _model(directory: Path) -> None:
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Evil"}}')
    (directory / "model" / "weights.bin").write_bytes(b"x")


FILES = [
    Bad("not YAML", (), ("not YAML", "line 1"), text="name: ["),
    Bad("tab", (), ("not YAML", "line 2"), text="name: x\n\tseed: 1"),
    Bad("a list", (), ("expected a mapping", "list"), text="- a\n- b"),
    Bad("empty", (), ("expected a mapping", "NoneType"), text=""),
    Bad("a Python tag", (), ("not YAML", "python/object"), text="name: !!python/object/apply:os.getcwd []"),
    Bad("not UTF-8", (), ("cannot be read", "0xe9"), text=b"name: caf\xe9"),
    Bad("a key twice", (), ("not YAML", "duplicate key 'seed'", "line 3"), text="seed: 1\nname: x\nseed: 2"),
    Bad("a variable that is not set", (), ("RATCHET_NO_SUCH", "not set"), text="name: ${RATCHET_NO_SUCH}"),
    Bad("a base that is not there", (), ("missing.yaml", "no such configuration file"), text="extends: missing.yaml"),
    Bad("a base that is itself", (), ("extends itself",), text="extends: bad.yaml"),
]
OVERRIDES = [
    Bad("no value", ("seed",), ("'seed'", "key=value")),
    Bad("no key", ("=5",), ("'=5'", "key=value")),
    Bad("a broken value", ("seed=[",), ("'seed=['", "not YAML")),
    Bad("an index beyond", ("rewards.7.weight=1",), ("rewards.7.weight", "'7'", "index below 1")),
    Bad("no index", ("rewards.first.weight=1",), ("rewards.first.weight", "'first'", "index below 1")),
    Bad("through a number", ("seed.x.y=1",), ("seed", "integer")),
    Bad("two faults", ("sede=1", "rounds.count=many"), ("sede", "unknown key", "rounds.count", "'many'"), lines=2),
]
# What only a look at the data, the models and the machine can tell.
PREFLIGHT = [
    Bad("data not there", ("data.prompts={kind: files, path: '{dir}/no.jsonl'}",), ("data.prompts.path", "no.jsonl")),
    Bad(
        "a folder without data",
        ("data.prompts={kind: files, path: '{dir}/empty'}",),
        ("data.prompts.path", "found nothing"),
        prepare=lambda d: (d / "empty").mkdir(),
    ),
    Bad("a store below a file", ("store={dir}/file/x",), ("store", "expected a directory"), prepare=_file("file")),
    Bad("a store that is a file", ("store={dir}/file",), ("store", "expected a directory"), prepare=_file("file")),
    Bad("a store in /proc", ("store=/proc/ratchet",), ("store /proc/ratchet", "expected a directory")),
    Bad("no such module", (RULE % "nosuch:rule",), ("'nosuch:rule'", "PYTHONPATH")),
    Bad("no such function", (RULE % "tests.fault.bad_configs:nosuch",), ("'nosuch'", "bad_configs.py")),
    Bad(
        "an option that a verifier lacks",
        (VERIFIER % "exact_match, options: {tolerance: 1}",),
        ("unknown option 'tolerance'", "exact_match"),
    ),
    Bad(
        "an option of another type",
        (VERIFIER % "keywords, options: {required: 3}",),
        ("option 'required'", "expected", "found 3"),
    ),
    Bad("a reserved name", (VERIFIER % "exact_match, name: total",), ("'total'", "expected a name other than")),
    Bad(
        "a reward server whose token is not set",
        ("rewards=[{kind: http, url: 'http://127.0.0.1:9/score', token_env: RATCHET_NO_SUCH_TOKEN}]",),
        ("token_env", "RATCHET_NO_SUCH_TOKEN"),
    ),
    Bad("no such model", ("model.base={kind: pretrained, path: ./no/model}",), ("model.base.path", "./no/model")),
    Bad(
        "a model with code",
        ("model.base={kind: pretrained, path: '{dir}/model'}",),
        ("config.json: 'auto_map'", "evil.Evil", "weights.bin", "found none; convert"),
        lines=3,
        prepare=_model,
    ),
    Bad("more prompts than rows", ("rounds.prompts_per_round=401",), ("at most 400", "found 401")),
    Bad(
        "GPUs that are not there",
        ("resources.trainer.gpus=[97]", "resources.generator.gpus=[98]"),
        ("resources.trainer.gpus", "[97]", "resources.generator.gpus", "[98]", "found"),
        lines=2,
    ),
    Bad(
        "a disk too small",
        (HUGE, "rounds.count=200", "rounds.snapshot_every=1"),
        ("store", "expected about", "free", "retention.policies (now all)", "rounds.snapshot_every (now 1)"),
    ),
    Bad(
        "everything at once",
        ("data.prompts={kind: files, path: '{dir}/no.jsonl'}", "store=/proc/ratchet", RULE % "nosuch:rule"),
        ("data.prompts.path", "store /proc/ratchet", "'nosuch:rule'"),
        lines=3,
    ),
]
# The configurations' own refusals, on the same small file that their test uses.
VALUES = [Bad(name, tuple(overrides), tuple(words)) for name, overrides, words in REFUSED]
ALL = [*FILES, *OVERRIDES, *PREFLIGHT, *VALUES]
