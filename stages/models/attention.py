"""The attention that keeps packed rows apart, in the form that transformers calls, and models that use it.

In bfloat16 and float16 on a GPU it is flash attention for variable lengths, if that passes a check on the device;
everywhere else it is scaled dot-product attention over blocks of similar shape.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from stages.artifacts.errors import InputError
from stages.models.packing import Packed, pack

NAME = "ratchet_packed"
_CHECKED_ROWS: tuple[tuple[list[int], list[int]], ...] = (
    ([1, 2, 3], [4]),
    ([1, 2, 3], [5] * 40),
    ([], [6] * 17),
    ([7], [8] * 5),
)
_CHECKED_WINDOW = 8
_AGREES_TO = 0.05


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packed | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention inside the rows of `packing`, in the form that transformers calls: [1, heads, N, width] each.

    Returns [1, N, heads, width]. Raises InputError for a family of models whose attention needs more than this.
    """
    unknown = sorted(k for k in ("softcap", "s_aux", "position_bias") if others.get(k) is not None)
    if packing is None or unknown:
        needs = f"it uses {', '.join(unknown)}" if unknown else "it does not hand its arguments on to attention"
        raise InputError(f"{type(module).__name__}: expected plain causal attention, found that {needs}")
    query_NHW, key_NHW, value_NHW = (x[0].transpose(0, 1) for x in (query, key, value))
    heads = (query_NHW.shape[1], key_NHW.shape[1], query_NHW.shape[2])
    if dropout == 0.0 and query.is_cuda and has_varlen(query.dtype, query.device, heads):
        out_NHW = by_varlen(query_NHW, key_NHW, value_NHW, packing, scaling, sliding_window)
    else:
        out_NHW = by_blocks(query_NHW, key_NHW, value_NHW, packing, scaling, sliding_window, dropout)
    return out_NHW.unsqueeze(0), None


def by_blocks(
    query_NHW: torch.Tensor,
    key_NHW: torch.Tensor,
    value_NHW: torch.Tensor,
    packing: Packed,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """[N, heads, width] each, keys and values of as many or fewer heads -> [N, heads, width]. Exact on every device."""
    outputs = []
    for block in packing.blocks.blocks:
        out_SHQW = scaled_dot_product_attention(
            _gather(query_NHW, block.query_SQ),
            _gather(key_NHW, block.key_SK),
            _gather(value_NHW, block.key_SK),
            attn_mask=block.mask(window),
            dropout_p=dropout,
            scale=scale,
            enable_gqa=query_NHW.shape[1] != key_NHW.shape[1],
        )
        outputs.append(out_SHQW.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, packing.blocks.inverse_N)


def by_varlen(
    query_NHW: torch.Tensor,
    key_NHW: torch.Tensor,
    value_NHW: torch.Tensor,
    packing: Packed,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """As by_blocks(), by PyTorch's kernel for variable lengths, without a padded cell. CUDA, bfloat16 or float16.

    A span's queries are the last of its keys, which is how the kernel reads a causal mask over fewer queries than keys.
    """
    ragged = packing.ragged
    out_NHW = varlen_attn(
        query_NHW.contiguous(),
        key_NHW.index_select(0, ragged.key_K),
        value_NHW.index_select(0, ragged.key_K),
        ragged.query_starts,
        ragged.key_starts,
        ragged.most_queries,
        ragged.most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_NHW.shape[1] != key_NHW.shape[1],
    )
    assert isinstance(out_NHW, torch.Tensor)  # nothing beside it was asked for
    return out_NHW


@lru_cache
def has_varlen(dtype: torch.dtype, device: torch.device, heads: tuple[int, int, int]) -> bool:
    """Whether by_varlen() gives what by_blocks() gives on `device`: values and gradients of a few ragged rows.

    heads: of queries, of keys and values, and their width. Once in a process; where it does not, says so on stderr.
    Raises torch.OutOfMemoryError: a device that is full for a moment must not decide for the process.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        # What the check saves for its own gradients is none of a checkpointed layer's, which may be what asks.
        with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            _require_the_same(dtype, device, heads)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AssertionError) as error:  # TypeError: an older PyTorch's kernel, without windows
        print(
            f"attention in {dtype} on {device}: expected flash attention's kernel to give what blocks give, found: "
            f"{error}; blocks are used, slower; nothing needs doing, or install the pinned versions",
            file=sys.stderr,
        )
        return False
    return True


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _require_the_same(dtype: torch.dtype, device: torch.device, heads: tuple[int, int, int]) -> None:
    packing = pack(_CHECKED_ROWS, device=device)
    generator = torch.Generator().manual_seed(0)
    queries, keys, width = heads
    shapes = [(len(packing.positions_N), count, width) for count in (queries, keys, keys)]
    query, key, value = (torch.randn(x, generator=generator).to(device, dtype).requires_grad_() for x in shapes)
    for window in (None, _CHECKED_WINDOW):
        outputs = [run(query, key, value, packing, None, window) for run in (by_blocks, by_varlen)]
        gradients = [torch.autograd.grad(output.square().sum(), (query, key, value)) for output in outputs]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=_AGREES_TO, atol=_AGREES_TO)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=_AGREES_TO, atol=_AGREES_TO)


def _gather(x_NHW: torch.Tensor, places_SL: torch.Tensor) -> torch.Tensor:
    """[N, heads, width], [S, L] -> [S, heads, L, width]."""
    picked = x_NHW.index_select(0, places_SL.flatten())
    return picked.view(*places_SL.shape, *x_NHW.shape[1:]).transpose(1, 2)


def hidden_states(decoder: nn.Module, packed: Packed) -> torch.Tensor:
    """The last hidden state of every token: [N, hidden]. `decoder` comes from a model that use_packing() was given."""
    output = decoder(
        input_ids=packed.input_ids_N.unsqueeze(0),
        position_ids=packed.positions_N.unsqueeze(0),
        use_cache=False,
        packing=packed,
    )
    hidden_ND: torch.Tensor = output.last_hidden_state[0]
    return hidden_ND


def use_packing(model: PreTrainedModel) -> None:
    """Let `model` compute its attention by packed_attention, and only so. Raises InputError where it cannot."""
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise InputError(f"{type(model).__name__}: expected a family that takes an attention function, found one fixed")


AttentionInterface.register(NAME, packed_attention)
