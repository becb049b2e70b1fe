"""Turns on a shared device: what a resident worker holds there goes to host memory, and comes back.

Knows neither vLLM nor DeepSpeed: what can leave a device by itself has rest() and resume(); modules are moved.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Resident(Protocol):
    """Something large on a device that is kept from job to job."""

    def rest(self) -> None:
        """Leave the device to another process."""

    def resume(self) -> None:
        """Take it again."""


def rest(live: Mapping[Any, Any]) -> None:
    """Leave the device. What was there must not be used before resume()."""
    for one in _held(live):
        one.rest() if isinstance(one, Resident) else one.to("cpu")
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def resume(live: Mapping[Any, Any]) -> None:
    """Take the device again."""
    for one in _held(live):
        if isinstance(one, Resident):
            one.resume()
        elif sys.modules["torch"].cuda.is_initialized():
            one.to("cuda")


def _held(live: Mapping[Any, Any]) -> Iterator[Any]:
    """What of `live`, whose values may be tuples, is on the device: residents, and torch modules."""
    module = getattr(sys.modules.get("torch"), "nn", None)
    for value in list(live.values()):
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Resident) or (module is not None and isinstance(one, module.Module)):
                yield one
