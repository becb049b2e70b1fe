"""Built-in rules: does a completion satisfy its prompt's reference answer? Pure text; never evaluates code.

Each is called as f(prompt=, completion=, answer=, **options) and returns a finite number, in [0, 1] unless it says
otherwise. Light: no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Literal

from configs.rewards import VerifierName
from stages.artifacts.errors import InputError
from stages.rewards.arithmetic import Expression, NotArithmetic, parse_expression
from stages.rewards.numerals import stated_number

_TAIL_CHARACTERS = 4000
_PUZZLE = re.compile(r"\s*(-?[0-9]{1,12})\s*:\s*\[?\s*([0-9]{1,12}(?:\s*,\s*[0-9]{1,12}){0,63})\s*\]?\s*")
_ARITHMETIC_RUN = re.compile(r"(?:[0-9()+\-*/ \t]|(?<=[0-9])\.(?=[0-9]))+")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "\u2212": "-"})  # noqa: RUF001
_LATEX = re.compile(r"\\(times|cdot|div|left|right)(?![a-zA-Z])")
_LATEX_SIGN = {"times": "*", "cdot": "*", "div": "/", "left": "", "right": ""}


def exact_match(*, prompt: str, completion: str, answer: str) -> float:
    """1 if the completion is the answer, white space at both ends aside; else 0."""
    return float(completion.strip() == answer.strip())


def position_match(*, prompt: str, completion: str, answer: str, length_penalty: float = 0.1) -> float:
    """Share of the answer's characters that stand in their place, minus a penalty for the wrong length. In [-1, 1].

    #{i : completion[i] = answer[i]} / len(answer) - length_penalty * |len(completion) - len(answer)|, clipped.
    White space at both ends aside. A dense version of `exact_match`: where the penalty is above 0, it is 1 exactly
    where that is.
    """
    found, wanted = completion.strip(), answer.strip()
    if length_penalty < 0:
        raise InputError(f"length_penalty: expected 0 or more, found {length_penalty}")
    in_place = sum(a == b for a, b in zip(found, wanted, strict=False))
    share = in_place / len(wanted) if wanted else float(not found)
    return max(-1.0, share - length_penalty * abs(len(found) - len(wanted)))


def numeric_answer(*, prompt: str, completion: str, answer: str, tolerance: float = 0.0) -> float:
    """1 if the completion's stated number is the answer's, to within `tolerance` (absolute); else 0.

    The stated number is the one after the last `####` (as in GSM8K), in the last `\\boxed{}`, or else the last
    number of the text. Compared as exact fractions: 1,000 = 1000.0 = 2000/2. Raises InputError if the answer
    states no number.
    """
    wanted = stated_number(answer)
    if wanted is None:
        raise InputError(f"numeric_answer: expected a number in the answer, found {answer[:80]!r}")
    if tolerance < 0:
        raise InputError(f"tolerance: expected 0 or more, found {tolerance}")
    found = stated_number(completion)
    return float(found is not None and abs(found - wanted) <= tolerance)


def countdown(*, prompt: str, completion: str, answer: str, use_all: bool = True, format_reward: float = 0.1) -> float:
    """1 if the completion's last expression makes the target from the given numbers; else `format_reward` or 0.

    answer: `target: n1, n2, ...`, also with brackets, as `90: [30, 5, 10, 2]`. Each given number may be used at
    most once, and with `use_all` each must be. A well-formed calculation with given numbers that has another value,
    or leaves some out, earns `format_reward`; a bare number does not. Exact (fractions): 1/3*3 is 1. No powers.
    Raises InputError if the answer is no puzzle.
    """
    puzzle = _PUZZLE.fullmatch(answer[:2000])
    if puzzle is None:
        raise InputError(f"countdown: expected an answer like '90: 30, 5, 10, 2', found {answer[:80]!r}")
    given = Counter(int(number) for number in puzzle[2].split(","))
    expression = last_expression(completion)
    if expression is None or Counter(expression.numbers) - given:
        return 0.0
    complete = not use_all or Counter(expression.numbers) == given
    if complete and expression.value == int(puzzle[1]):
        return 1.0
    return float(format_reward) if len(expression.numbers) > 1 else 0.0


def length(
    *,
    prompt: str,
    completion: str,
    answer: str,
    target: int | None = None,
    tolerance: int = 0,
    max: int | None = None,
    unit: Literal["characters", "words", "tokens"] = "characters",
    num_tokens: int | None = None,
) -> float:
    """1 where the length is right, falling linearly to 0 as it goes wrong by as much again.

    target: 1 within `target` +- `tolerance`, 0 when off by `target` more. max: 1 up to `max`, 0 from twice that.
    Exactly one of the two. num_tokens is given by the caller, not by the user; the EOS counts.
    """
    if (target is None) == (max is None):
        raise InputError("length: expected exactly one of the options target and max")
    limit = target if max is None else max
    if limit is None or limit < 1 or tolerance < 0:
        raise InputError(f"length: expected target or max of at least 1 and tolerance >= 0, found {limit}, {tolerance}")
    counts = {"characters": len(completion), "words": len(completion.split()), "tokens": num_tokens}
    count = counts[unit]
    if count is None:
        raise InputError("length: unit tokens needs the rollout's token ids")
    excess = count - limit if max is not None else abs(count - limit) - tolerance
    return min(1.0, 1.0 - excess / limit) if excess < limit else 0.0


def keywords(
    *,
    prompt: str,
    completion: str,
    answer: str,
    required: tuple[str, ...] = (),
    forbidden: tuple[str, ...] = (),
    case_sensitive: bool = False,
) -> float:
    """Share of the required words present, 0 if any forbidden one is. Whole words; 1 if none is required."""
    if not (required or forbidden):
        raise InputError("keywords: expected at least one of the options required and forbidden")
    if any(_has_word(completion, word, case_sensitive=case_sensitive) for word in forbidden):
        return 0.0
    if not required:
        return 1.0
    return sum(_has_word(completion, word, case_sensitive=case_sensitive) for word in required) / len(required)


def last_expression(text: str) -> Expression | None:
    """The last arithmetic expression of a text: the last with an operator, else the last bare number. None if bad.

    `(30 + 10) * 2 = 80` is read as `(30 + 10) * 2`. Reads the last 4000 characters and takes ×, ÷ and LaTeX signs.
    """  # noqa: RUF002
    tail = _LATEX.sub(lambda match: _LATEX_SIGN[match[1]], text[-_TAIL_CHARACTERS:].translate(_SIGNS))
    runs = [run for run in (_trim(found) for found in _ARITHMETIC_RUN.findall(tail)) if run]
    with_operator = [run for run in runs if any(sign in run for sign in "+-*/")]
    for run in (with_operator or runs)[-1:]:
        try:
            return parse_expression(run)
        except NotArithmetic:
            return None
    return None


def _trim(run: str) -> str:
    """Cut off list bullets, markdown stars, dangling operators and parentheses that the text around opened."""
    run = run.strip().rstrip("+-*/( \t").lstrip("+*/) \t")
    if run.startswith("- "):
        run = run[2:].lstrip()
    if not any(character.isdigit() for character in run):
        return ""
    surplus = run.count("(") - run.count(")")
    while surplus < 0 and run.endswith(")"):
        run, surplus = run[:-1].rstrip(), surplus + 1
    while surplus > 0 and run.startswith("("):
        run, surplus = run[1:].lstrip(), surplus - 1
    return run


def _has_word(text: str, word: str, *, case_sensitive: bool) -> bool:
    flags = re.NOFLAG if case_sensitive else re.IGNORECASE
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, flags) is not None


VERIFIERS: dict[VerifierName, Callable[..., float]] = {
    "exact_match": exact_match,
    "numeric_answer": numeric_answer,
    "countdown": countdown,
    "position_match": position_match,
    "length": length,
    "keywords": keywords,
}
"""Every built-in rule by the name that a configuration gives it."""

NEEDS_ANSWER: frozenset[VerifierName] = frozenset({"exact_match", "numeric_answer", "countdown", "position_match"})
"""The rules that mean nothing without a reference answer."""
