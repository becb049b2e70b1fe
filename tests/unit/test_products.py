"""float32 products on CPU: oneDNN's are as exact as PyTorch's own, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

from stages.engines.products import use_onednn


@pytest.fixture(autouse=True)
def _onednn() -> Iterator[None]:
    kernels = use_onednn()
    assert kernels is not None and kernels is use_onednn(), "the pinned PyTorch has it; once for a process"
    yield
    kernels._destroy()
    use_onednn.cache_clear()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (1, 64, 3), (7, 64, 192), (300, 192, 24), (257, 130, 63)])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_float64(m: int, k: int, n: int, bias: bool) -> None:
    inputs = [drawn(m, k), drawn(n, k), *([drawn(n)] if bias else [])]
    single = [x.clone().requires_grad_() for x in inputs]
    double = [x.double().requires_grad_() for x in inputs]
    weights = drawn(m, n)
    found, expected = linear(*single), linear(*double)
    (found * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(single, double, strict=True))]
    for here, there in pairs:
        assert here is not None and there is not None
        scale = max(1.0, float(there.detach().abs().max()))
        assert torch.allclose(here.double() / scale, there / scale, rtol=0.0, atol=2e-6)


def test_the_same_bits_again_for_every_layout() -> None:
    left, right = drawn(130, 70), drawn(70, 50)
    layouts = [
        (left, right),
        (left.t().contiguous().t(), right),
        (left, right.t().contiguous().t()),
        (left[::2], right),
    ]
    for a, b in layouts:
        assert torch.equal(a @ b, a @ b)
        assert torch.allclose(a @ b, (a.double() @ b.double()).float(), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_types_and_empty_ones_are_pytorchs_own(dtype: torch.dtype) -> None:
    left, right = (drawn(6, 4) * 3).to(dtype), (drawn(4, 5) * 3).to(dtype)
    expected = torch.mm(left, right, out=torch.empty(6, 5, dtype=dtype))
    assert torch.equal(left @ right, expected) and (left @ right).dtype == dtype
    for m, k, n in [(0, 4, 5), (6, 0, 5), (6, 4, 0)]:
        assert torch.equal(torch.ones(m, k) @ torch.ones(k, n), torch.zeros(m, n))


def test_addmm_with_factors_and_wide_biases() -> None:
    left, right, bias = drawn(6, 4), drawn(4, 5), drawn(6, 5)
    assert torch.allclose(torch.addmm(bias, left, right), bias + left @ right, atol=1e-5)
    scaled = torch.addmm(bias[0], left, right, beta=0.5, alpha=2.0)
    assert torch.allclose(scaled, 0.5 * bias[0] + 2.0 * (left @ right), atol=1e-5)


def test_odd_strides_give_the_same_numbers() -> None:
    left, right = drawn(6, 4), drawn(4, 9)
    for bias in (drawn(27)[::3], drawn(1).expand(9), drawn(18)[9:]):
        assert torch.allclose(torch.addmm(bias, left, right), bias + left @ right, atol=1e-5)
    for odd in (drawn(40).as_strided((4, 9), (2, 1)), drawn(8, 18)[::2, ::2], drawn(4, 1).expand(4, 9)):
        assert torch.allclose(left @ odd, (left.double() @ odd.double()).float(), atol=1e-5)


def test_forward_and_backward_passes_go_there_and_other_types_do_not() -> None:
    def products(dtype: torch.dtype) -> tuple[int, int]:
        x, w, b = (t.to(dtype).requires_grad_() for t in (drawn(6, 4), drawn(5, 4), drawn(5)))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            (linear(x, w, b).sum() + linear(x, w).sum()).backward()
        names = [event.name for event in seen.events() or []]
        return names.count("mkldnn::_linear_pointwise"), sum(name in ("aten::mm", "aten::addmm") for name in names)

    assert products(torch.float32) == (6, 6), "two forward, two gradients each"
    assert products(torch.float64)[0] == products(torch.bfloat16)[0] == 0


def test_wrong_shapes_are_refused_as_ever() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        drawn(2, 3) @ drawn(4, 5)


def test_a_process_that_asks_for_it_says_nothing() -> None:
    program = (
        "import torch; from stages.engines.products import use_onednn as go; go(); torch.ones(2, 2) @ torch.ones(2, 2)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120.0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
