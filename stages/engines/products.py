"""Matrix products on CPU: float32 ones go to oneDNN. Names no engine."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, library


@cache
def use_onednn() -> Any:
    """From now on this process computes float32 `mm` and `addmm` on CPU, forward and backward, with oneDNN.

    PyTorch gives them to MKL, which is half as fast on a processor that is not Intel's (ADR 14).
    None, and nothing changes, where this build of PyTorch has no oneDNN. Returns what keeps it so; it is remembered.
    """
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    kernels: Any = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        kernels.impl("mm", _mm, "CPU", allow_override=True)
        kernels.impl("addmm", _addmm, "CPU", allow_override=True)
    return kernels


def _mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    if _is_ours(left_MK, right_KN):
        return _linear(left_MK, right_KN, bias_N=None)
    shape = (left_MK.shape[0], right_KN.shape[1])
    return torch.mm(left_MK, right_KN, out=left_MK.new_empty(shape))  # PyTorch's own: `out` is another operator


def _addmm(bias: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    plain = beta == 1 and alpha == 1 and bias.shape == right_KN.shape[1:] and bias.is_contiguous()
    plain = plain and bias.dtype == torch.float32
    if plain and _is_ours(left_MK, right_KN):
        return _linear(left_MK, right_KN, bias_N=bias)
    shape = (left_MK.shape[0], right_KN.shape[1])
    return torch.addmm(bias, left_MK, right_KN, beta=beta, alpha=alpha, out=left_MK.new_empty(shape))


def _is_ours(left_MK: Tensor, right_KN: Tensor) -> bool:
    fits = left_MK.dim() == right_KN.dim() == 2 and left_MK.shape[1] == right_KN.shape[0]
    strided = left_MK.layout == right_KN.layout == torch.strided
    return (
        fits
        and strided
        and left_MK.dtype == right_KN.dtype == torch.float32
        and min(*left_MK.shape, right_KN.shape[1]) > 0
    )


def _linear(left_MK: Tensor, right_KN: Tensor, *, bias_N: Tensor | None) -> Tensor:
    if not (right_KN.is_contiguous() or right_KN.t().is_contiguous()):
        right_KN = right_KN.contiguous()  # oneDNN refuses some strides
    product_MN: Tensor = torch.ops.mkldnn._linear_pointwise.default(left_MK, right_KN.t(), bias_N, "none", [], "")
    return product_MN
