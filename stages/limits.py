"""What a worker's device can do at most, measured: what a stage's floating-point operations are held against."""

from __future__ import annotations

import time

import torch

_BURSTS = 8
_BURST_SECONDS = 0.02


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of square matrix products, the best of short bursts, 0.2 s in all.

    The largest burst counts: others may be at work on the machine at the same time.
    """
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(_BURSTS):
        done, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < _BURST_SECONDS:
            torch.mm(left, right)
            if device.type == "cuda":
                torch.cuda.synchronize()
            done += 1
        best = max(best, done * 2.0 * size**3 / seconds)
    return best
