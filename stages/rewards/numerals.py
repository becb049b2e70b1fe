"""Numbers in running text, read exactly. Bounded: reads the end of a long text, refuses very long numerals."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 100
_TAIL_CHARACTERS = 2000

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMERAL = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)\]}])[-+][$€£]?)?"
    r"(?:\\[dt]?frac\{(?P<frac_top>[0-9]+)\}\{(?P<frac_bottom>[0-9]+)\}"
    r"|(?P<whole>[0-9]+) (?P<part>[0-9]+)/(?P<parts>[0-9]+)(?![0-9.,/])"
    rf"|(?P<top>{_UNSIGNED})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9A-Za-z]))?"
    rf"(?:\s?/\s?(?P<bottom>{_UNSIGNED}))?)"
)
_BOXED = "\\boxed{"


def stated_number(text: str) -> Fraction | None:
    """The number that `text` gives as its answer: after the last `####`, in the last `\\boxed{}`, or the last one.

    Understands thousands commas, signs, decimals, 1e3, a/b, `1 1/2` and `\\frac{a}{b}`. None if there is none.
    """
    _, marker, after = text.rpartition("####")
    if marker:
        found = _numbers(after[:_TAIL_CHARACTERS].lstrip().partition("\n")[0])
        return found[0] if found else None
    start = text.rfind(_BOXED)
    if start >= 0:
        found = _numbers(_braced(text[start + len(_BOXED) :][:_TAIL_CHARACTERS]))
        return found[-1] if found else None
    found = _numbers(text[-_TAIL_CHARACTERS:])
    return found[-1] if found else None


def _braced(text: str) -> str:
    depth = 1
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:end]
    return text


def _numbers(text: str) -> list[Fraction | None]:
    return [_value(match) for match in _NUMERAL.finditer(text.replace("\u2212", "-"))]


def _value(match: re.Match[str]) -> Fraction | None:
    """None for a numeral that is too long or has a zero below the line."""
    if len(match[0]) > MAX_DIGITS:
        return None
    try:
        if match["frac_top"]:
            value = Fraction(int(match["frac_top"]), int(match["frac_bottom"]))
        elif match["whole"]:
            value = int(match["whole"]) + Fraction(int(match["part"]), int(match["parts"]))
        else:
            value = _decimal(match["top"]) * Fraction(10) ** int(match["exponent"] or 0)
            if match["bottom"]:
                value /= _decimal(match["bottom"])
    except ZeroDivisionError:
        return None
    return -value if (match["sign"] or "").startswith("-") else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
