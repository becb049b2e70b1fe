"""Which torch device a worker uses, and how deterministic it is. Names no engine."""

from __future__ import annotations

import torch
from torch.utils import deterministic

from stages.engines.products import use_onednn
from stages.job import Compute


def open_device(compute: Compute) -> torch.device:
    """The device of this process, threads pinned; on CPU with deterministic algorithms and oneDNN's matrix products."""
    torch.set_num_threads(compute.threads)
    if compute.device == "cuda":
        return torch.device("cuda", 0)
    use_onednn()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Every buffer is written before it is read; filling gigabytes of them with NaN first costs a second a step.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device("cpu")
