"""The measured limit is a rate that this machine has, and asking for it again gives about the same."""

from __future__ import annotations

import time

import pytest
import torch

from stages.limits import matmul_flops_per_second


def test_the_limit_is_what_matrix_products_reach() -> None:
    cpu = torch.device("cpu")
    started = time.perf_counter()
    first, second = (matmul_flops_per_second(cpu, torch.float32) for _ in range(2))
    assert time.perf_counter() - started < 10.0
    left = torch.randn(1024, 1024)
    started = time.perf_counter()
    _ = left @ left
    assert first > 0.2 * 2 * 1024**3 / (time.perf_counter() - started)
    assert first == pytest.approx(second, rel=0.9)
