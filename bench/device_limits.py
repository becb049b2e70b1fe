"""`python -m bench.device_limits cuda bfloat16`: prints bytes per second of a copy, and operations per second.

Both are the best of short bursts: what a roofline is made of.
"""

from __future__ import annotations

import sys

import torch

from stages.engines.products import use_onednn
from stages.limits import limits_of


def main() -> int:
    """Measure."""
    device, dtype = torch.device(sys.argv[1]), getattr(torch, sys.argv[2])
    use_onednn()
    found = limits_of(device, dtype)
    print(found.bytes_per_second, found.flops_per_second)
    return 0


if __name__ == "__main__":
    sys.exit(main())
