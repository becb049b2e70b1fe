"""What a worker's device can do at most, measured: what a stage's work is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BURSTS = 8
_BURST_SECONDS = 0.02
_COPIED_BYTES = {"cuda": 512 << 20, "cpu": 128 << 20}


@dataclass(frozen=True)
class Limits:
    """What a device does, measured: bytes per second copied (read and written), operations per second."""

    bytes_per_second: float
    flops_per_second: float


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """The best of short bursts, half a second in all: others may be at work on the machine at the same time."""
    return Limits(copied_bytes_per_second(device), matmul_flops_per_second(device, dtype))


def limits_if_there_is_room(*, on_gpu: bool) -> Limits | None:
    """Of this process's device: products in float32 on CPU, in bfloat16 on a GPU. None if memory is full.

    Measured without a seed of any job's: the next job sets its own.
    """
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    try:
        return limits_of(device, dtype)
    except RuntimeError:  # also cuBLAS and the host say so; what a figure of the ledger costs must never be a job
        return None


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of square matrix products."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 * _most_per_second(device, lambda: torch.mm(left, right))


def copied_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written per second by copying a tensor that is larger than any cache."""
    source = torch.ones(_COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() * source.element_size() * _most_per_second(device, lambda: target.copy_(source))


def _most_per_second(device: torch.device, operation: Callable[[], object]) -> float:
    best = 0.0
    for _ in range(_BURSTS):
        done, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < _BURST_SECONDS:
            operation()
            if device.type == "cuda":
                torch.cuda.synchronize()
            done += 1
        best = max(best, done / seconds)
    return best
