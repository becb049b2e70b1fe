"""Reward sources: options checked early, functions found without running them, bad rewards refused by name."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.rewards import FunctionSource, RewardModelSource, VerifierSource
from stages.artifacts.errors import GateError, InputError
from stages.rewards.code import code_digest
from stages.rewards.options import validate_options
from stages.rewards.sources import load_function, rule_rewards

_numbers = itertools.count()

RULE = '''"""A user's module."""

def rate(*, prompt, completion, answer):
    """Says how good it is."""
    return len(completion) / 2  # half
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fresh user module in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = f"user_rule_{next(_numbers)}"
    Path(f"{name}.py").write_text(RULE)
    return name


def row(prompt_id: str = "p0", **fields: object) -> dict[str, object]:
    return {"prompt_id": prompt_id, "sample_index": 0, "prompt": "p", "completion": "abcd", "answer": "abcd"} | fields


def verifier(name: str, **options: object) -> VerifierSource:
    return VerifierSource.model_validate({"verifier": name, "options": options})


# options


@pytest.mark.parametrize(
    "source",
    [
        verifier("exact_match"),
        verifier("position_match", length_penalty=0),
        verifier("numeric_answer", tolerance=1e-6),
        verifier("countdown", use_all=False, format_reward=0.2),
        verifier("length", target=3, tolerance=1, unit="tokens"),
        verifier("keywords", required=["a", "b"]),
        RewardModelSource(),
    ],
)
def test_good_options_pass(source: VerifierSource) -> None:
    validate_options(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (verifier("exact_match", strict=True), "unknown option 'strict'; expected none"),
        (verifier("countdown", use_al=True), "unknown option 'use_al'; expected format_reward, use_all"),
        (verifier("countdown", use_all=1), "option 'use_all': expected true or false, found 1"),
        (verifier("countdown", format_reward="x"), "option 'format_reward': expected a number, found 'x'"),
        (verifier("length", max=True), "option 'max': expected a whole number, found True"),
        (verifier("length", max=2, unit="bytes"), "option 'unit': expected characters, words, tokens, found 'bytes'"),
        (verifier("length", max=2, num_tokens=1), "unknown option 'num_tokens'"),
        (verifier("length"), "expected exactly one of the options target and max"),
        (verifier("keywords", required="red"), "option 'required': expected a list of strings, found 'red'"),
        (verifier("keywords"), "expected at least one of the options required and forbidden"),
        (verifier("numeric_answer", tolerance=-1), "tolerance: expected 0 or more, found -1"),
        (verifier("exact_match", prompt="x"), "unknown option 'prompt'"),
    ],
)
def test_bad_options_are_refused_by_name(source: VerifierSource, message: str) -> None:
    with pytest.raises(InputError) as caught:
        validate_options(source)
    assert str(caught.value).startswith(f"reward source {source.name!r} (verifier {source.verifier}): ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["total", "samples", "completion_tokens"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"reward source '{name}': expected a name other than"):
        validate_options(VerifierSource(verifier="exact_match", name=name))


def test_a_function_is_looked_for_when_options_are_validated(module: str) -> None:
    validate_options(FunctionSource(function=f"{module}:rate"))
    with pytest.raises(InputError, match=f"reward function '{module}:rat': expected 'rat' at the top level of .*py"):
        validate_options(FunctionSource(function=f"{module}:rat"))
    with pytest.raises(InputError, match="no module 'no_such_module' found as Python source; looked in"):
        validate_options(FunctionSource(function="no_such_module:rate"))


def test_validating_is_light() -> None:
    heavy = "'torch', 'pyarrow', 'transformers', 'numpy'"
    program = f"import sys, stages.rewards.sources; print([n for n in ({heavy}) if n in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# code_digest


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# half", "# a half, really", True),
        ("Says how good it is.", "Says how bad it is.", True),
        ("A user's module.", "Mine.", True),
        ("\n\ndef", "\n\n\n\n# here\ndef", True),
        ("/ 2", "/  2", True),
        ("/ 2", "/ 3", False),
        ("completion)", "answer)", False),
        ("return", "x = 1\n    return", False),
    ],
)
def test_digest_sees_code_and_not_comments(module: str, old: str, new: str, same: bool) -> None:
    before = code_digest(f"{module}:rate")
    assert old in RULE
    Path(f"{module}.py").write_text(RULE.replace(old, new))
    assert (code_digest(f"{module}:rate") == before) is same


def test_digest_does_not_run_anything(module: str) -> None:
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text("raise SystemExit('ran')")
    Path("pack/rules.py").write_text("raise SystemExit('ran')\ndef rate(**_): return 1.0\n")
    assert len(code_digest("pack.rules:rate")) == 64
    assert "pack" not in sys.modules


def test_digest_follows_the_users_own_imports(module: str) -> None:
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text("")
    Path("pack/rules.py").write_text(f"import math\nfrom . import depth\nfrom {module} import rate\n")
    Path("pack/depth.py").write_text("from .rules import rate  # a circle\nLIMIT = 3\n")
    first = code_digest("pack.rules:rate")
    Path("pack/depth.py").write_text("from .rules import rate\nLIMIT = 4\n")
    second = code_digest("pack.rules:rate")
    Path(f"{module}.py").write_text(RULE.replace("/ 2", "/ 5"))
    assert len({first, second, code_digest("pack.rules:rate")}) == 3


def test_digest_of_broken_source_is_refused(module: str) -> None:
    Path(f"{module}.py").write_text("def rate(:\n")
    with pytest.raises(InputError, match=rf"{module}.py: expected Python source, found invalid syntax"):
        code_digest(f"{module}:rate")


# load_function


def test_a_function_is_loaded_from_the_working_directory(module: str) -> None:
    assert load_function(f"{module}:rate")(prompt="", completion="abcd", answer="") == 2.0


def test_a_function_edited_during_a_run_is_refused_and_after_it_reloaded(module: str) -> None:
    function = f"{module}:rate"
    digest = code_digest(function)
    assert load_function(function, digest=digest)(prompt="", completion="ab", answer="") == 1.0
    Path(f"{module}.py").write_text(RULE.replace("/ 2", "/ 40"))
    # this run planned with the old code and has it in memory: it goes on
    assert load_function(function, digest=digest)(prompt="", completion="ab", answer="") == 1.0
    # a run planned with code that is no longer there is refused
    with pytest.raises(InputError, match=r"expected the code that the run was planned with .* start the run again"):
        load_function(function, digest="0" * 64)
    # a run planned with the new code gets the new code
    assert load_function(function, digest=code_digest(function))(prompt="", completion="ab", answer="") == 0.05


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_thing\n", "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("1 / 0\n", "cannot be imported: ZeroDivisionError: division by zero"),
        ("x = 1\n", "expected a function in module 'user_rule_.*', found None"),
        ("rate = 3\n", "expected a function in module 'user_rule_.*', found 3"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(module: str, source: str, message: str) -> None:
    Path(f"{module}.py").write_text(source)
    with pytest.raises(InputError, match=f"reward function '{module}:rate': {message}"):
        load_function(f"{module}:rate")


# rule_rewards


def test_rewards_come_in_the_order_of_the_rows(module: str) -> None:
    rows = [row(completion="abcd"), row(completion="x"), row(completion="")]
    assert rule_rewards(FunctionSource(function=f"{module}:rate"), rows) == [2.0, 0.5, 0.0]
    assert rule_rewards(verifier("exact_match"), rows) == [1.0, 0.0, 0.0]
    assert rule_rewards(verifier("position_match", length_penalty=0.0), rows) == [1.0, 0.0, 0.0]


def test_length_in_tokens_counts_the_rollouts_ids() -> None:
    source = verifier("length", target=3, unit="tokens")
    rows = [row(completion_ids=[1, 2, 3]), row(completion_ids=[1, 2])]
    assert rule_rewards(source, rows) == pytest.approx([1.0, 2 / 3])
    with pytest.raises(InputError, match="unit tokens needs the rollout's token ids"):
        rule_rewards(source, [row()])


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("float('nan')", r"nan \(float\)"),
        ("float('inf')", r"inf \(float\)"),
        ("-1e39", r"-1e\+39 \(float\)"),
        ("10 ** 5000", r"inf \(int\)"),
        ("None", r"None \(NoneType\)"),
        ("'1.0'", r"'1.0' \(str\)"),
        ("[1.0]", r"\[1.0\] \(list\)"),
        ("1j", r"1j \(complex\)"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_refused(module: str, result: str, found: str) -> None:
    Path(f"{module}.py").write_text(f"def rate(*, prompt, completion, answer):\n    return {result}\n")
    message = f"reward source 'rate', prompt_id p7: expected a finite number as reward, found {found}"
    with pytest.raises(GateError, match=message):
        rule_rewards(FunctionSource(function=f"{module}:rate"), [row("p7")])


@pytest.mark.parametrize(("result", "expected"), [("1", 1.0), ("True", 1.0), ("numpy.float32(0.5)", 0.5)])
def test_numbers_of_other_kinds_are_taken(module: str, result: str, expected: float) -> None:
    Path(f"{module}.py").write_text(f"import numpy\ndef rate(*, prompt, completion, answer):\n    return {result}\n")
    found = rule_rewards(FunctionSource(function=f"{module}:rate"), [row()])
    assert found == [expected] and type(found[0]) is float and not isinstance(found[0], np.floating)
    assert math.isfinite(found[0])


def test_a_rule_that_fails_names_source_and_prompt(module: str) -> None:
    Path(f"{module}.py").write_text("def rate(*, prompt, completion, answer):\n    return {}[answer]\n")
    with pytest.raises(InputError, match="reward source 'rate', prompt_id p7: the rule failed: KeyError: 'abcd'"):
        rule_rewards(FunctionSource(function=f"{module}:rate"), [row("p7")])
    Path(f"{module}.py").write_text("def rate(prompt, completion):\n    return 1.0  # lacks answer\n")
    with pytest.raises(InputError, match=r"the rule failed: TypeError: .*unexpected keyword argument 'answer'"):
        rule_rewards(FunctionSource(function=f"{module}:rate"), [row()], digest=code_digest(f"{module}:rate"))


@pytest.mark.parametrize("name", ["exact_match", "position_match", "numeric_answer", "countdown"])
def test_a_missing_reference_answer_is_refused(name: str) -> None:
    where = f"reward source '{name}', prompt_id p7"
    with pytest.raises(InputError, match=f"{where}: expected a reference answer, found none"):
        rule_rewards(verifier(name), [row("p7", answer=" ")])


def test_an_answer_that_a_verifier_cannot_read_names_the_prompt() -> None:
    with pytest.raises(InputError, match="'countdown', prompt_id p7: countdown: expected an answer like '90: 30, 5"):
        rule_rewards(verifier("countdown"), [row("p7")])
