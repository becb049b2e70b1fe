"""The learning rate of each optimizer step. Names no engine."""

from __future__ import annotations

import math

from configs.models import Optimizer


def learning_rate(optimizer: Optimizer, *, step: int, num_steps: int | None) -> float:
    """The rate of optimizer step `step` (from 0): a pure function, so that no scheduler state can be lost.

    num_steps: length of the schedule; None (open-ended) allows only `constant`.
    """
    warm = min(1.0, (step + 1) / (optimizer.warmup_steps + 1))
    if optimizer.schedule == "constant" or num_steps is None:
        return optimizer.learning_rate * warm
    span = max(1, num_steps - optimizer.warmup_steps)
    done = min(1.0, max(0, step - optimizer.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if optimizer.schedule == "cosine" else 1 - done
    return optimizer.learning_rate * warm * (optimizer.final_fraction + (1 - optimizer.final_fraction) * shape)
