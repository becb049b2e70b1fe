"""The built-in rules: what they reward and what they refuse, by hand and on real data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from stages.artifacts.errors import InputError
from stages.rewards.verifiers import countdown, exact_match, keywords, length, numeric_answer, position_match

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PUZZLE = "90: [30, 5, 10, 2]"


def text(completion: str, answer: str = "", **options: object) -> dict[str, object]:
    return {"prompt": "p", "completion": completion, "answer": answer, **options}


def rows_of(name: str) -> list[dict[str, object]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_exact_match() -> None:
    assert exact_match(**text(" 1259\n", "1259")) == 1.0
    assert exact_match(**text("1259.", "1259")) == 0.0
    assert exact_match(**text("12 59", "1259")) == 0.0
    assert exact_match(**text("Yes", "yes")) == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("1259", 1.0),
        (" 1259 ", 1.0),
        ("1295", 0.5),
        ("125", 0.75 - 0.1),  # three of four in place, one missing
        ("12599", 1.0 - 0.1),
        ("", -0.4),
        ("259", 0.0 - 0.1),  # shifted by one: nothing in place
        ("1259" + "9" * 40, -1.0),  # 1 - 4 cut to -1
    ],
)
def test_position_match(completion: str, expected: float) -> None:
    assert position_match(**text(completion, "1259")) == pytest.approx(expected)


def test_position_match_options() -> None:
    assert position_match(**text("125", "1259", length_penalty=0.25)) == 0.5
    assert position_match(**text("12599", "1259", length_penalty=0.0)) == 1.0
    with pytest.raises(InputError, match="length_penalty: expected 0 or more, found -1"):
        position_match(**text("1", "1", length_penalty=-1))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so 40 + 2 = 42", "42"),
        ("It is 42.", "#### 42"),
        ("42 apples, 3 pears\n#### 42\nand 7 more", "42"),
        ("#### 41\nNo.\n#### 42", "42"),
        ("####42", "42"),
        ("#### $1,234,567.50", "1234567.5"),
        ("#### -7", "-7"),
        ("x = \u22127", "-7"),  # the minus of typesetters
        ("costs -$7", "-7"),
        ("10-7", "7"),  # a difference, no sign
        ("f(3)-7", "7"),
        ("Answer: \\boxed{42} since 7 < 8", "42"),
        ("\\boxed{\\frac{1}{4}}", "0.25"),
        ("\\boxed{-\\dfrac{3}{4}}", "-0.75"),
        ("\\boxed{x = {42}} 9", "42"),
        ("1/4", ".25"),
        ("a quarter: 3/12", "1/4"),
        ("1 1/2 cups", "1.5"),
        ("18.0", "18"),
        ("1000", "1,000"),
        ("1e3", "1000"),
        ("2.5e-1", "1/4"),
        ("He pays 1,200 dollars", "1200"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("<<48/2=24>>24", "24"),
    ],
)
def test_numeric_answer_finds_and_compares(completion: str, answer: str) -> None:
    assert numeric_answer(**text(completion, answer)) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", "42"),
        ("forty-two", "42"),
        ("42 or 43", "42"),
        ("#### none, though 42", "43"),
        ("42 ####", "42"),  # nothing after the marker
        ("\\boxed{} 42", "42"),
        ("1/0", "0"),
        ("1/0", "1"),
        ("\u0664\u0662", "42"),  # Arabic-Indic digits
        ("\uff14\uff12", "42"),  # full-width digits
        ("9" * 5000, "9"),
        ("42.0000001", "42"),
        ("-42", "42"),
        ("4,2", "42"),
        ("nan", "0"),
        ("inf", "0"),
    ],
)
def test_numeric_answer_refuses(completion: str, answer: str) -> None:
    assert numeric_answer(**text(completion, answer)) == 0.0


def test_numeric_answer_options_and_faults() -> None:
    assert numeric_answer(**text("42.0000001", "42", tolerance=1e-6)) == 1.0
    assert numeric_answer(**text("43", "42", tolerance=0.999)) == 0.0
    with pytest.raises(InputError, match="expected a number in the answer, found 'many'"):
        numeric_answer(**text("42", "many"))
    with pytest.raises(InputError, match="tolerance: expected 0 or more"):
        numeric_answer(**text("42", "42", tolerance=-1.0))


def test_numeric_answer_agrees_with_gsm8k() -> None:
    """Real model solutions with human labels. Every official answer must also match itself."""
    rows = rows_of("gsm8k/example_model_solutions_visible.jsonl")
    agree = total = 0
    for row in rows:
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            reward = numeric_answer(prompt="", completion=row[model]["solution"], answer=row["ground_truth"])
            agree += bool(reward) == row[model]["is_correct"]
            total += 1
    print(f"numeric_answer agrees with is_correct on {agree} of {total}")
    assert agree / total > 0.99
    for row in rows_of("gsm8k/train.jsonl")[:500]:
        assert numeric_answer(prompt="", completion=row["answer"], answer=row["answer"]) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "((30 + 10) + 5) * 2",
        "((30+10)+5)*2 = 90",
        "First 30+10 = 40, then:\n<answer> (30 + 10 + 5) * 2 </answer>",
        "The answer is (30 + 10 + 5) * 2.",
        "- (30 + 10 + 5) * 2",
        "**(30 + 10 + 5) * 2**",
        "(so (30 + 10 + 5) * 2)",
        "(so 30*(10-5-2))",
        "((30 + 10 + 5) * 2 it is",
        "1. (30 + 10 + 5) * 2",
        "(30 + 10 + 5) × 2",  # noqa: RUF001
        "\\boxed{\\left(30 + 10 + 5\\right) \\times 2}",
        "30 * (10 - 5 - 2)",
        "30 / (10 / 5) * 2 * 3 = 90, no: 30*(10-5-2)",
        "-30 * (5 + 2 - 10)",
    ],
)
def test_countdown_accepts(completion: str) -> None:
    assert countdown(**text(completion, PUZZLE)) == 1.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("30 + 5 + 10 + 2", 0.1),  # given numbers, wrong value
        ("30 * 5 - 10 * 2 * 3", 0.0),  # 3 was not given
        ("30 + 30 + 30", 0.0),  # 30 was given once
        ("(30 + 10 + 5) * 2 + 0", 0.0),
        ("90", 0.0),
        ("30", 0.0),  # a given number, but no calculation
        ("", 0.0),
        ("ninety", 0.0),
        ("(30 + 10 + 5 * 2", 0.1),  # the parenthesis that is never closed is taken for the text's
        ("30 5 +", 0.0),
        ("30 +* 5", 0.0),
        ("30 ** 2", 0.0),
        ("(30)(5)", 0.0),
        ("30 // 5", 0.0),
        ("30 / (10 - 5 * 2)", 0.0),  # division by zero
        ("3.0 * 30", 0.0),
        ("1e2 - 10", 0.1),  # read as 2 - 10: letters end an expression
        ("\u0663\u0660 + 5", 0.0),  # the Arabic-Indic 30 is no number: read as 5
    ],
)
def test_countdown_scores(completion: str, expected: float) -> None:
    assert countdown(**text(completion, PUZZLE)) == expected


def test_countdown_options_and_answers() -> None:
    without_10 = "(30 + 5) * 2"
    assert countdown(**text(without_10, "70: 30, 5, 10, 2")) == 0.1
    assert countdown(**text(without_10, "70: 30, 5, 10, 2", use_all=False)) == 1.0
    assert countdown(**text("30 + 5", "70: 30, 5", format_reward=0.25)) == 0.25
    assert countdown(**text("1 / 3 * 3", "1: 1,3,3")) == 1.0  # exact, not 0.999...
    assert countdown(**text("4 - 6", "-2: 4,6")) == 1.0
    assert countdown(**text("5 + 5", "10: 5, 5")) == 1.0
    assert countdown(**text("It is 5", "5: 5")) == 1.0
    for answer in ("", "90", "90: ", "90: a", "90: 3, -4", "x: 3", "90: 3 4", "{'90': [3]}", "9" * 100 + ": 3"):
        with pytest.raises(InputError, match="countdown: expected an answer like"):
            countdown(**text("3", answer))


def test_countdown_accepts_every_synthetic_solution() -> None:
    rows = rows_of("countdown_synthetic/train.jsonl")
    for row in random.Random(0).sample(rows, 2000):
        answer = f"{row['target']}: {row['nums']}"
        assert countdown(prompt="", completion=row["solution"], answer=answer) == 1.0
        told = f"I think it is {row['solution']} = {row['target']}."
        assert countdown(prompt="", completion=told, answer=answer) == 1.0
        other = f"{row['target'] + 1}: {row['nums']}"
        assert countdown(prompt="", completion=row["solution"], answer=other) == 0.1


@pytest.mark.parametrize(
    ("completion", "options", "expected"),
    [
        ("abcd", {"max": 4}, 1.0),
        ("abcdef", {"max": 4}, 0.5),
        ("abcdefgh", {"max": 4}, 0.0),
        ("", {"max": 4}, 1.0),
        ("a", {"max": 1}, 1.0),
        ("abcd", {"target": 4}, 1.0),
        ("abc", {"target": 4}, 0.75),
        ("abcdef", {"target": 4}, 0.5),
        ("abcdef", {"target": 4, "tolerance": 2}, 1.0),
        ("", {"target": 4}, 0.0),
        ("a" * 99, {"target": 4}, 0.0),
        ("one two three", {"target": 3, "unit": "words"}, 1.0),
        ("one two three", {"max": 2, "unit": "tokens", "num_tokens": 3}, 0.5),
    ],
)
def test_length(completion: str, options: dict[str, object], expected: float) -> None:
    assert length(**text(completion, **options)) == expected


@pytest.mark.parametrize("options", [{}, {"max": 1, "target": 1}, {"max": 0}, {"target": 3, "tolerance": -1}])
def test_length_refuses_contradictions(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match="length: expected"):
        length(**text("abc", **options))


def test_keywords() -> None:
    assert keywords(**text("Red and blue.", required=("red", "blue"))) == 1.0
    assert keywords(**text("Red and green", required=("red", "blue"))) == 0.5
    assert keywords(**text("red, not grey", required=("red",), forbidden=("grey",))) == 0.0
    assert keywords(**text("fine", forbidden=("grey",))) == 1.0
    assert keywords(**text("reddish", required=("red",))) == 0.0  # whole words
    assert keywords(**text("Red", required=("red",), case_sensitive=True)) == 0.0
    assert keywords(**text("C++ is fun", required=("C++",))) == 1.0  # no regular expression
    assert keywords(**text("aaa", required=(".*",))) == 0.0
    with pytest.raises(InputError, match="at least one of the options required and forbidden"):
        keywords(**text("a"))
