"""Exact arithmetic on small expressions, by recursive descent over fractions. Never evaluates code.

expression = term {("+" | "-") term};  term = factor {("*" | "/") factor};  factor = ["-"] atom;
atom = whole number | "(" expression ")".
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 400
MAX_DEPTH = 40
MAX_DIGITS = 12

_DIGITS = frozenset("0123456789")


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression comes to, and the whole numbers written in it, in order."""

    value: Fraction
    numbers: tuple[int, ...]


class NotArithmetic(ValueError):
    """Text that is not an expression of this grammar, is too long or too deep, or divides by zero."""


def parse_expression(text: str) -> Expression:
    """Read and evaluate `text`. Raises NotArithmetic."""
    if len(text) > MAX_CHARACTERS:
        raise NotArithmetic(f"expected at most {MAX_CHARACTERS} characters, found {len(text)}")
    parser = _Parser(_tokens(text))
    value = parser.expression(depth=0)
    if parser.peek():
        raise NotArithmetic(f"expected the end, found {parser.peek()!r}")
    return Expression(value=value, numbers=tuple(parser.numbers))


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    start = 0
    while start < len(text):
        character = text[start]
        end = start + 1
        if character in _DIGITS:
            while end < len(text) and text[end] in _DIGITS:
                end += 1
            if end - start > MAX_DIGITS:
                raise NotArithmetic(f"expected a number of at most {MAX_DIGITS} digits, found {end - start}")
        elif character not in "+-*/() \t":
            raise NotArithmetic(f"unexpected {character!r}")
        if character not in " \t":
            tokens.append(text[start:end])
        start = end
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.numbers: list[int] = []

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def expression(self, *, depth: int) -> Fraction:
        value = self.term(depth=depth)
        while self.peek() in ("+", "-"):
            value = value + self.term(depth=depth) if self.take() == "+" else value - self.term(depth=depth)
        return value

    def term(self, *, depth: int) -> Fraction:
        value = self.factor(depth=depth)
        while self.peek() in ("*", "/"):
            if self.take() == "*":
                value = value * self.factor(depth=depth)
            else:
                divisor = self.factor(depth=depth)
                if divisor == 0:
                    raise NotArithmetic("division by zero")
                value = value / divisor
        return value

    def factor(self, *, depth: int) -> Fraction:
        if self.peek() == "-":
            self.take()
            return -self.atom(depth=depth)
        return self.atom(depth=depth)

    def atom(self, *, depth: int) -> Fraction:
        token = self.take()
        if token == "(":
            if depth >= MAX_DEPTH:
                raise NotArithmetic(f"expected at most {MAX_DEPTH} nested parentheses")
            value = self.expression(depth=depth + 1)
            if self.take() != ")":
                raise NotArithmetic("expected )")
            return value
        if token and token[0] in _DIGITS:
            self.numbers.append(int(token))
            return Fraction(int(token))
        raise NotArithmetic(f"expected a number or (, found {token!r}")
