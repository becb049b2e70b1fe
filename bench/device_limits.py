"""`python -m bench.device_limits cuda bfloat16`: prints bytes per second of a copy, and operations per second.

Both are the best of short bursts: what a roofline is made of.
"""

from __future__ import annotations

import sys
import time

import torch

from stages.engines.products import use_onednn
from stages.limits import matmul_flops_per_second

_BURSTS = 8


def copied_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written per second by copying a tensor that is larger than any cache."""
    source = torch.ones((4 << 30 if device.type == "cuda" else 256 << 20) // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(_BURSTS):
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2.0 * source.numel() * 4 / (time.perf_counter() - started))
    return best


def main() -> int:
    """Measure."""
    device, dtype = torch.device(sys.argv[1]), getattr(torch, sys.argv[2])
    use_onednn()
    print(copied_bytes_per_second(device), matmul_flops_per_second(device, dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
