"""Rewards by rules: built-in verifiers and the user's own functions. Knows no model and no artifact."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from configs.rewards import LARGEST_REWARD, FunctionSource, VerifierSource
from stages.artifacts.errors import GateError, InputError
from stages.rewards.code import code_digest
from stages.rewards.options import validate_options
from stages.rewards.verifiers import NEEDS_ANSWER, VERIFIERS

__all__ = ["code_digest", "load_function", "rule_rewards", "validate_options"]

Row = Mapping[str, Any]
_loaded: dict[str, str] = {}


def load_function(function: str, *, digest: str | None = None) -> Callable[..., Any]:
    """Import `module:function`. `digest`: what `code_digest` said when the run was planned.

    Raises InputError if it cannot be imported, is not callable, or was edited since.
    """
    module, _, name = function.partition(":")
    if _loaded.get(function) != (digest or ""):
        found = code_digest(function) if digest else None
        if digest and found != digest:
            raise InputError(
                f"reward function {function!r}: expected the code that the run was planned with ({digest[:12]}…), "
                f"found an edited one ({(found or '')[:12]}…); start the run again to score by the new code"
            )
        _import(module, function=function, again=function in _loaded)
    value: Callable[..., Any] | None = getattr(sys.modules[module], name, None)
    if not callable(value):
        raise InputError(f"reward function {function!r}: expected a function in module {module!r}, found {value!r}")
    _loaded[function] = digest or ""
    return value


def _import(module: str, *, function: str, again: bool) -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(module)
        if again:
            importlib.reload(found)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"reward function {function!r}: cannot be imported: {reason}") from error


def rule_rewards(
    source: VerifierSource | FunctionSource, rows: Sequence[Row], *, digest: str | None = None
) -> list[float]:
    """The reward of each rollout row by one source, in the order of the rows.

    A row has prompt_id, prompt, completion and answer, and completion_ids where `length` counts tokens. Raises
    InputError if the rule fails or lacks a reference answer, and GateError if it returns anything but a finite
    number: NaN is refused, never replaced.
    """
    if isinstance(source, FunctionSource):
        rule = load_function(source.function, digest=digest)
        options: dict[str, Any] = {}
        needs_answer = False
    else:
        rule = VERIFIERS[source.verifier]
        options = dict(source.options)
        needs_answer = source.verifier in NEEDS_ANSWER
    counts_tokens = isinstance(source, VerifierSource) and "num_tokens" in inspect.signature(rule).parameters
    rewards = []
    for row in rows:
        where = f"reward source {source.name!r}, prompt_id {row['prompt_id']}"
        if needs_answer and not row["answer"].strip():
            raise InputError(f"{where}: expected a reference answer, found none; map one in data.prompts.columns")
        if counts_tokens:
            options["num_tokens"] = len(row["completion_ids"]) if "completion_ids" in row else None
        try:
            value = rule(prompt=row["prompt"], completion=row["completion"], answer=row["answer"], **options)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except Exception as error:
            raise InputError(f"{where}: the rule failed: {type(error).__name__}: {error}") from error
        rewards.append(_finite(value, where=where))
    return rewards


def _finite(value: Any, *, where: str) -> float:
    try:
        reward = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
        found = reward if isinstance(value, Real) else repr(value)[:80]
        raise GateError(f"{where}: expected a finite number as reward, found {found} ({type(value).__name__})")
    return reward
