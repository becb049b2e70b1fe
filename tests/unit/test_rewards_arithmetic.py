"""The arithmetic parser against Python's own arithmetic on random trees, and its bounds."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from stages.rewards.arithmetic import MAX_DEPTH, NotArithmetic, parse_expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),  # from the left
        ("24 / 4 / 2", 3),
        ("2 * -3", -6),
        ("-(2 + 3)", -5),
        ("1/3 + 1/6", Fraction(1, 2)),
        ("007", 7),
    ],
)
def test_values(text: str, value: Fraction) -> None:
    assert parse_expression(text).value == value


def test_numbers_are_kept_in_order_and_without_signs() -> None:
    assert parse_expression("(30 - 5) * -2 / 30").numbers == (30, 5, 2, 30)


def tree(rng: random.Random, depth: int) -> tuple[str, Fraction]:
    """A random expression and its value, computed while it is written."""
    if depth == 0 or rng.random() < 0.2:
        number = rng.randint(0, 99)
        return str(number), Fraction(number)
    (left, a), (right, b) = tree(rng, depth - 1), tree(rng, depth - 1)
    sign = rng.choice("+-*/" if b else "+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a / b
    return f"({left}){' ' * rng.randint(0, 2)}{sign}({right})", value


def test_random_trees() -> None:
    rng = random.Random(4)
    seen = 0
    while seen < 300:
        text, value = tree(rng, 4)
        if len(text) <= 400:
            assert parse_expression(text).value == value
            seen += 1


@pytest.mark.parametrize(
    "text",
    ["", " ", "+", "1 +", "* 1", "1 1", "(1", "1)", "()", "1 / 0", "1/(2-2)", "1.5", "2**3", "--1", "x", "1\n+1", "²"],
)
def test_what_is_not_arithmetic(text: str) -> None:
    with pytest.raises(NotArithmetic):
        parse_expression(text)


def test_bounds() -> None:
    assert parse_expression("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    with pytest.raises(NotArithmetic, match=f"at most {MAX_DEPTH} nested parentheses"):
        parse_expression("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))
    with pytest.raises(NotArithmetic, match="at most 400 characters, found 401"):
        parse_expression("1" + "+1" * 200)
    with pytest.raises(NotArithmetic, match="at most 12 digits, found 13"):
        parse_expression("1" * 13)
