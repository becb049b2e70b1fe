"""A case for stages.rl.reference: the JSON document, checked, as float64 tensors; a convention with its overrides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from configs.conventions import (
    Aggregation,
    GrpoConvention,
    KlEstimator,
    KlPlacement,
    PpoConvention,
    RewardPlacement,
)

PER_TOKEN = ("logprobs", "old_logprobs", "ref_logprobs", "values", "new_values")
_KEYS = ("completion_mask", "rewards", *PER_TOKEN, "hyperparameters", "group_size")

C = TypeVar("C", PpoConvention, GrpoConvention)


class CaseError(ValueError):
    """A case that cannot be evaluated: one line with the key, what was expected and what was found."""


@dataclass(frozen=True)
class Case:
    """mask_BT: bool. rewards_B. tokens: the per-token columns that were given, [B, T], 0 outside what counts."""

    mask_BT: Tensor
    rewards_B: Tensor
    tokens: Mapping[str, Tensor]
    group_size: int | None
    hyperparameters: Mapping[str, Any]

    def column(self, name: str) -> Tensor:
        """The per-token column of that name. Raises CaseError where the case does not have it."""
        if name not in self.tokens:
            raise CaseError(f"{name}: expected a list of numbers per sequence, found nothing")
        return self.tokens[name]

    def group_B(self) -> Tensor:
        """The number of each row's group: `group_size` rows after one another. Raises CaseError."""
        count = self.rewards_B.numel()
        if self.group_size is None or self.group_size < 1 or count % self.group_size:
            raise CaseError(f"group_size: expected a divisor of the {count} sequences, found {self.group_size}")
        return torch.arange(count) // self.group_size


def read_case(document: object) -> Case:
    """Check `document` and turn its lists into float64 tensors. Other keys, such as a name, are let be.

    Raises CaseError.
    """
    if not isinstance(document, dict):
        raise CaseError(f"input: expected an object with {', '.join(_KEYS)}, found {_kind(document)}")
    for key in document:
        if key not in _KEYS and (meant := get_close_matches(key, _KEYS, cutoff=0.85)):
            raise CaseError(f"{key}: expected {meant[0]}, found a key that is almost that")
    mask = _rows(document, "completion_mask")
    for b, row in enumerate(mask):
        if set(row) - {0.0, 1.0} or sum(row) == 0:
            raise CaseError(f"completion_mask[{b}]: expected zeros and ones with at least one 1, found {row}")
    shape = (len(mask), len(mask[0]))
    tokens = {}
    for name in PER_TOKEN:
        if name in document:
            rows = _rows(document, name)
            if (len(rows), len(rows[0])) != shape:
                raise CaseError(f"{name}: expected {_size(shape)} as completion_mask, found {_size_of(rows)}")
            tokens[name] = torch.tensor(rows, dtype=torch.float64)
    rewards = document.get("rewards")
    if not isinstance(rewards, list) or len(rewards) != len(mask):
        found = f"{len(rewards)} of them" if isinstance(rewards, list) else _kind(rewards)
        raise CaseError(f"rewards: expected {len(mask)} numbers, one per sequence, found {found}")
    numbers = [_number(value, key=f"rewards[{b}]") for b, value in enumerate(rewards)]
    given = document.get("hyperparameters", {})
    if not isinstance(given, dict):
        raise CaseError(f"hyperparameters: expected an object, found {_kind(given)}")
    size = document.get("group_size", given.get("group_size"))
    if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
        raise CaseError(f"group_size: expected a whole number, found {size!r}")
    return Case(
        mask_BT=torch.tensor(mask, dtype=torch.float64).bool(),
        rewards_B=torch.tensor(numbers, dtype=torch.float64),
        tokens=tokens,
        group_size=size,
        hyperparameters={key: value for key, value in given.items() if key != "group_size"},
    )


def with_overrides(convention: C, case: Case) -> C:
    """The convention with the case's hyperparameters in place of its own. Raises CaseError.

    `clip` sets both sides. What only the other method has, such as gae_lambda for GRPO, changes nothing.
    """
    changes: dict[str, Any] = {}
    for key, value in case.hyperparameters.items():
        if key != "clip" and key not in _CHECKS:
            known = ", ".join(["clip", *_CHECKS])
            raise CaseError(f"hyperparameters.{key}: expected one of {known}, found an unknown name")
        checked = _CHECKS["clip_low" if key == "clip" else key](value, key=f"hyperparameters.{key}")
        names = ("clip_low", "clip_high") if key == "clip" else (key,)
        changes |= {name: checked for name in names if hasattr(convention, name)}
    return replace(convention, **changes)


def _number(value: object, *, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CaseError(f"{key}: expected a finite number, found {value!r}")
    return float(value)


def _optional(value: object, *, key: str) -> float | None:
    return None if value is None else _number(value, key=key)


def _flag(value: object, *, key: str) -> bool:
    if not isinstance(value, bool):
        raise CaseError(f"{key}: expected true or false, found {value!r}")
    return value


def _one_of(names: object) -> Callable[..., str]:
    def check(value: object, *, key: str) -> str:
        if value not in get_args(names):
            raise CaseError(f"{key}: expected one of {', '.join(get_args(names))}, found {value!r}")
        return str(value)

    return check


_CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("kl_coef", "discount", "gae_lambda", "clip_low", "clip_high", "std_eps"), _number),
    **dict.fromkeys(("value_clip", "dual_clip", "reward_clip", "log_ratio_limit"), _optional),
    **dict.fromkeys(("whiten_advantages", "scale_by_std", "cumulate_kl"), _flag),
    "kl_estimator": _one_of(KlEstimator),
    "kl_placement": _one_of(KlPlacement),
    "aggregation": _one_of(Aggregation),
    "reward_placement": _one_of(RewardPlacement),
}


def _rows(document: dict[str, Any], name: str) -> list[list[float]]:
    """A rectangular list of lists of finite numbers."""
    rows = document.get(name)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise CaseError(f"{name}: expected a list of numbers per sequence, found {_kind(rows)}")
    for b, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise CaseError(f"{name}[{b}]: expected {len(rows[0])} numbers, padded on the right, found {len(row)}")
    return [[_number(x, key=f"{name}[{b}][{t}]") for t, x in enumerate(row)] for b, row in enumerate(rows)]


def _size(shape: tuple[int, int]) -> str:
    return f"{shape[0]} rows of {shape[1]}"


def _size_of(rows: list[list[float]]) -> str:
    return _size((len(rows), len(rows[0])))


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.60}"
