"""The attention of packed rows, by blocks and by the kernel for variable lengths."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stages.models.attention import by_blocks, by_varlen, has_varlen
from stages.models.batches import TokenBatch
from stages.models.language import TokenLogprobs
from stages.models.packing import Packed, pack
from tests.unit.test_packing import model_of, rollouts

CPU = torch.device("cpu")
ROWS = [([], [5, 6, 7]), *rollouts(4, 3, seed=2), ([5, 6], [])]


def inputs(packing: Packed, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries of four heads, keys and values of two, eight wide."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(packing.positions_N), heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 4])
def test_the_kernels_indices_name_what_a_span_attends_to(window: int | None) -> None:
    """Flash attention as it is documented, span by span: the queries are the last of the keys, and look back alone."""
    packing = pack(ROWS, device=CPU)
    query, key, value = inputs(packing)
    ragged = packing.ragged
    outputs, longest = [], [0, 0]
    for span in range(len(packing.spans)):
        query_slice = slice(*ragged.query_starts[span : span + 2].tolist())
        places = ragged.key_K[slice(*ragged.key_starts[span : span + 2].tolist())]
        own, keys, values = query[query_slice], key[places], value[places]
        ahead = torch.arange(len(keys)) - torch.arange(len(own))[:, None] - (len(keys) - len(own))
        seen = (ahead <= 0) & (ahead > -(window or len(keys)))
        scores = torch.einsum("qhw,khw->hqk", own, keys.repeat_interleave(2, 1)) * 8**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khw->qhw", weights, values.repeat_interleave(2, 1)))
        longest = [max(longest[0], len(own)), max(longest[1], len(keys))]
    assert [ragged.most_queries, ragged.most_keys] == longest
    assert ragged.query_starts.dtype == ragged.key_starts.dtype == torch.int32
    torch.testing.assert_close(torch.cat(outputs), by_blocks(query, key, value, packing, None, window))


def test_the_kernel_takes_what_it_is_given() -> None:
    """Its shapes, forward and backward, without a GPU."""
    with FakeTensorMode():
        packing = pack(ROWS, device=CPU)
        given = inputs(packing, torch.bfloat16)
        out = by_varlen(*given, packing, 0.5, 4)
        assert out.shape == given[0].shape
        gradients = torch.autograd.grad(out.sum(), given)
    assert [gradient.shape for gradient in gradients] == [x.shape for x in given]


def test_where_there_is_no_kernel_blocks_are_used_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    has_varlen.cache_clear()
    with torch.inference_mode():
        assert not has_varlen(torch.float32, CPU, (4, 2, 8))
        assert capsys.readouterr().err == ""
        assert not has_varlen(torch.bfloat16, CPU, (4, 2, 8))
    said = capsys.readouterr().err
    assert said.startswith("attention in torch.bfloat16 on cpu: expected flash attention's kernel to give what blocks")
    assert "; blocks are used, slower; " in said


def test_a_checkpointed_layer_may_be_what_asks() -> None:
    """The first forward pass of a process may be one that is computed again for its gradients."""
    has_varlen.cache_clear()
    model = model_of("llama", torch.float32)
    language_model = TokenLogprobs(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    asked = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: asked.append(has_varlen(torch.bfloat16, CPU, (4, 2, 8))))
    batch = TokenBatch.of([p for p, _ in ROWS[1:-1]], [c for _, c in ROWS[1:-1]], device=CPU)
    language_model(batch.packed, batch.select_M, batch.targets_M, 1.0)[0].sum().backward()
    assert asked == [False] * 4  # two layers, and both again
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_agrees_with_blocks() -> None:
    has_varlen.cache_clear()
    assert has_varlen(torch.bfloat16, torch.device("cuda", 0), (12, 2, 128))
