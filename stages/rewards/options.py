"""Is a reward source usable? Asked when a configuration is read, before anything runs. Light: no torch."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from configs.rewards import FunctionSource, HttpSource, RewardSource, VerifierSource
from stages.artifacts.errors import InputError
from stages.rewards.code import code_digest
from stages.rewards.http import check_http_source
from stages.rewards.verifiers import VERIFIERS

RESERVED_NAMES = frozenset({"total", "completion_tokens", "samples"})
"""Names that the reward and evaluation files use for themselves."""

_GIVEN = frozenset({"prompt", "completion", "answer", "num_tokens"})
_TRIAL_ANSWER = "1: 1"


def validate_options(source: RewardSource) -> None:
    """Refuse an unknown option, a value of the wrong type or range, a function that cannot be found, or a server's
    token that is not there.

    Nothing of the user's is executed, and no server asked. Raises InputError naming the source, the option and what
    was expected.
    """
    if source.name in RESERVED_NAMES:
        raise InputError(f"reward source {source.name!r}: expected a name other than {sorted(RESERVED_NAMES)}")
    if isinstance(source, FunctionSource):
        code_digest(source.function)
    if isinstance(source, HttpSource):
        check_http_source(source)
    if not isinstance(source, VerifierSource):
        return
    where = f"reward source {source.name!r} (verifier {source.verifier})"
    verifier = VERIFIERS[source.verifier]
    hints = get_type_hints(verifier)
    expected = sorted(set(inspect.signature(verifier).parameters) - _GIVEN)
    for option, value in source.options.items():
        if option not in expected:
            raise InputError(f"{where}: unknown option {option!r}; expected {_one_of(expected)}")
        if not _fits(value, hints[option]):
            kind = _spell(hints[option])
            raise InputError(f"{where}: option {option!r}: expected {kind}, found {value!r}")
    try:
        tokens = {"num_tokens": 1} if "num_tokens" in hints else {}
        verifier(prompt="", completion="1", answer=_TRIAL_ANSWER, **source.options, **tokens)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_spell(part) for part in get_args(hint) if part is not type(None))
    if origin is Literal:
        return _one_of(get_args(hint))
    if origin is tuple:
        return "a list of strings"
    return {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}[hint]


def _one_of(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
