"""No completion can do more than earn a number: hostile text is neither run, nor slow, nor able to crash a rule.

There is no reward that runs what a model wrote: no rule starts a process, evaluates code or opens a file.
"""

from __future__ import annotations

import ast
import math
import sys
import time
from pathlib import Path
from typing import Any

from stages.artifacts.errors import InputError
from stages.rewards import verifiers
from stages.rewards.verifiers import VERIFIERS

CALLS: dict[str, dict[str, Any]] = {
    "exact_match": {"answer": "90"},
    "position_match": {"answer": "90"},
    "numeric_answer": {"answer": "90"},
    "countdown": {"answer": "90: [30, 5, 10, 2]"},
    "length": {"answer": "", "max": 10},
    "keywords": {"answer": "", "required": ("red",), "forbidden": ("blue",)},
}

_watching: list[str] | None = None
_HARMLESS = ("object.__", "gc.", "sys._getframe", "builtins.id", "time.sleep")


def _watch(event: str, _arguments: object) -> None:
    if _watching is not None and not event.startswith(_HARMLESS):
        _watching.append(event)


sys.addaudithook(_watch)  # sees open, exec, compile, import, subprocess, os.system, socket, ...


def code() -> list[str]:
    """Text that does something if anybody evaluates it."""
    return [
        "__import__('os').system('id')",
        "open('/tmp/canary','w').write('1')",
        "exec('1')",
        "eval('1+1')",
        "compile('1','','eval')",
        "().__class__.__bases__[0].__subclasses__()",
        "lambda: 0",
        "[x for x in (1,2)]",
        "print(1)",
        "exit()",
        "os.remove('/tmp/canary')",
        "`id`",
        "$(id)",
        "{{7*7}}",
        "${7*7}",
        "%s%n",
        "'; DROP TABLE rollouts; --",
        "import socket",
        *(f"{call}('touch /tmp/canary')" for call in ("os.system", "os.popen", "subprocess.run", "pty.spawn", "exec")),
        *(f"__builtins__.{name}('1')" for name in ("eval", "exec", "open", "compile", "__import__", "breakpoint")),
        *(f"{{0.__class__.{name}}}" for name in ("__mro__", "__init__.__globals__", "__subclasses__", "__base__")),
        *(f"(lambda f=f: f)().{name}" for name in ("gi_frame", "cr_frame", "__code__", "__closure__", "__globals__")),
        "getattr(int, '__doc__')",
        "type('x', (), {'__add__': print})() + 1",
        "globals()['__builtins__']",
        "vars()",
        "setattr(__import__('sys'), 'path', [])",
        "[].append.__self__.__class__",
        "1 if open('/etc/passwd') else 2",
        "(yield 1)",
        "await x",
        "raise SystemExit",
        "assert False",
        "del VERIFIERS",
        "x := 5",
        "f'{open(0)}'",
        "b'\x80\x04K\x01.'",
        "!!python/object/apply:os.system ['id']",
        "<script>alert(1)</script>",
        "<!ENTITY xxe SYSTEM 'file:///etc/passwd'>",
        "=cmd|' /C calc'!A0",
        "#{7*7}",
        "<%= 7*7 %>",
        "\\write18{id}",
        "\\input{/etc/passwd}",
        "\\def\\x{\\x\\x}\\x",
        "../../etc/passwd",
        "\x1b]0;owned\x07\x1b[2J",
        "__reduce__",
    ]


def bombs() -> list[str]:
    """Text whose value, or whose reading, is enormous."""
    powers = ["9**9**9**9", "9^9^9^9", "9!" * 50, "2<<99999999", "1e999999999", "1e-999999999", "1/0", "0/0"]
    digits = ["9" * 100_000, "0x" + "f" * 9999, "-" + "9" * 5000, "0." + "0" * 9000 + "1", "1," + "000," * 9000 + "000"]
    products = ["*".join(["999999999999"] * n) for n in (10, 31, 1000, 20_000)]
    quotients = ["/".join(["999999999999", *["7"] * n]) for n in (10, 190, 30_000)]
    huge = ["1" + "0" * n for n in (12, 13, 99, 100, 101, 4300, 4301, 99_999)] + [
        "1e4300",
        "1E+99999",
        "9" * 4300 + "!",
    ]
    ratios = ["1/" + "0" * 50 + "1", "1/3" * 400, "0/1/0", "1//2", "5%0", "1.5/0.0", "-0", "--1", "+-+-1", "1/(1-1)"]
    return powers + digits + products + quotients + huge + ratios


def deep() -> list[str]:
    """Text nested too deep for a recursive reader."""
    pairs = [("(", ")"), ("[", "]"), ("{", "}"), ("-(", ")"), ("\\boxed{", "}"), ("\\left(", "\\right)")]
    nested = [left * n + "1" + right * n for left, right in pairs for n in (39, 41, 5000, 50_000)]
    return [*nested, "(" * 100_000, ")" * 100_000, "-" * 100_000 + "1", "+".join(["1"] * 100_000)]


def odd() -> list[str]:
    """Characters that some function calls digits, spaces or text, and another does not."""
    digits = ["\u0661\u0662", "\uff11+\uff11", "\u00b2", "\u2460", "\u0967\u0966", "\U0001d7d8", "\u216b", "1\u0661"]
    breaks = ["1\x002", "\x00" * 5000, "\ud800", "\u202e1+1", "1\u200b2", "\ufeff90", "\u2028" * 9, "\r\n" * 9]
    digits += ["\u0be7", "\u0e51", "\u1369", "\u3007", "\u4e00", "\U0001f51f", "\u00bd", "1\u20442", "\u0966.\u0967"]
    words = ["NaN", "Infinity", "-inf", "1_000", "0b1", "0o7", "1j", "1e", "e1", "None", "e\u0301" * 4000, "\ufffd"]
    return digits + breaks + words


def slow() -> list[str]:
    """Text that makes a careless regular expression backtrack."""
    pieces = ["1,", "1,111", "#", "#### ", "1 ", "1/", ".", "1 1/", " ", "\t1", "- ", "1e", "a", "$", "+-", "( "]
    pieces += ["\\frac{", "\\frac{1}{", "1.", ".1", "1e+", "\\times", "\n", "1\n+"]
    pieces += ["\\boxed{", "\\boxed{1", "####", "red", "r", "blue ", "1 1 ", "1,1", "\\left(", "}{", "- - ", "\u00d7"]
    return [piece * (100_000 // len(piece)) for piece in pieces]


def attacks() -> list[str]:
    """All of them, bare and inside the places where an answer is looked for."""
    base = code() + bombs() + deep() + odd() + slow()
    frames = ["#### {}", "\\boxed{{{}}}", "(30+10+5)*2 = {}", "{}+1"]
    return base + [frame.format(attack) for frame in frames for attack in base]


def test_two_hundred_attacks_earn_a_number_and_nothing_else() -> None:
    global _watching
    cases = attacks()
    assert len({*code(), *bombs(), *deep(), *odd(), *slow()}) >= 200 and set(CALLS) == set(VERIFIERS)
    for name, options in CALLS.items():
        VERIFIERS[name](prompt="p", completion="1 + 1", **options)  # fills the cache of regular expressions
    slowest, events = 0.0, []
    for completion in cases:
        for name, options in CALLS.items():
            _watching, started = events, time.thread_time()  # of the processor, which others may use
            try:
                reward = VERIFIERS[name](prompt="p", completion=completion, **options)
            finally:
                seconds, _watching = time.thread_time() - started, None
            slowest = max(slowest, seconds)
            assert isinstance(reward, float) and math.isfinite(reward) and abs(reward) <= 1.0, (name, completion[:80])
            assert seconds < 0.5, f"{name} took {seconds:.2f} s for {completion[:80]!r}"
    assert events == []
    print(
        f"S10: {len(cases) // 5} attacks, bare and in 4 frames, on {len(CALLS)} rules: 0 effects, "
        f"the slowest {slowest * 1000:.1f} ms"
    )


def test_no_rule_can_run_code_by_what_its_modules_import_and_call() -> None:
    allowed = {"__future__", "collections", "configs", "dataclasses", "fractions", "re", "stages", "typing"}
    for name in ("verifiers", "arithmetic", "numerals"):
        tree = ast.parse((Path(verifiers.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {module.partition(".")[0] for module in imported} <= allowed, f"{name}: {imported}"
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert called & {"eval", "exec", "compile", "open", "getattr", "__import__", "input"} == set(), name


def test_the_watch_sees_an_evaluation() -> None:
    global _watching
    _watching = events = []
    try:
        eval("1 + 1")
    finally:
        _watching = None
    assert "compile" in events and "exec" in events


def test_no_attack_guesses_the_answer() -> None:
    for completion in code() + bombs() + deep() + odd() + slow():
        assert VERIFIERS["countdown"](prompt="", completion=completion, answer="90: [30, 5, 10, 2]") == 0.0
        if completion != "\ufeff90":  # a byte order mark before the right number: the number counts
            assert VERIFIERS["numeric_answer"](prompt="", completion=completion, answer="90") == 0.0


def test_an_attack_in_the_answer_is_refused_in_few_words() -> None:
    refused = 0
    for answer in attacks():
        for name in ("numeric_answer", "countdown"):
            started = time.thread_time()
            try:
                VERIFIERS[name](prompt="p", completion="1", answer=answer)
            except InputError as error:
                refused += 1
                assert len(str(error)) < 1000
            assert time.thread_time() - started < 0.5
    assert refused > 200
