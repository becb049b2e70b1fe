"""Intervals for measured shares and means. Plain numbers, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z = 1.959963984540054


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927). (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share, z2 = successes / trials, _Z**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): 95 % interval of a mean; Wilson's where every value is 0 or 1, else the normal one."""
    count = len(values)
    mean = math.fsum(values) / count
    if all(value in (0.0, 1.0) for value in values):
        return mean, *wilson_interval(int(math.fsum(values)), count)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, count - 1)
    half = _Z * math.sqrt(variance / count)
    return mean, mean - half, mean + half
