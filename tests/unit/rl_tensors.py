"""The tensors that the tests of the mathematics share: four ragged completions, float64, and exact comparison."""

from __future__ import annotations

import torch
from torch import Tensor

LENGTHS = [5, 1, 3, 4]
MASK_BT = torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def f64(*rows: object) -> Tensor:
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64)


def random_BT(seed: int) -> Tensor:
    return torch.randn(MASK_BT.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, expected: object, *, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)
