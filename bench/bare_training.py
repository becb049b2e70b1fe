"""The floor of training: DeepSpeed and a transformers model, no house around them, on the tokens of a finished run.

Started by bench/floors.py, one process per rank, on CPU. Rows are packed without a single padding token: linear layers
see one flat sequence, attention runs over rows of equal length together. Also timed: a forward pass alone, of which a
round makes one for the old logprobs and one for the reference.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from stages.engines.products import use_onednn

_lengths: list[int] = []


def main(path: str) -> None:
    """Train on the rounds of the JSON document at `path`; rank 0 writes the figures beside it."""
    settings = json.loads(Path(path).read_text())
    torch.set_num_threads(settings["threads"])
    use_onednn()  # the faster products are the floor's too
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{path}.rendezvous", rank=rank, world_size=ranks)
    engine = _engine(settings)
    figures = []
    for index, found in enumerate([settings["rounds"][0], *settings["rounds"]]):
        rows = [[*prompt, *ids] for prompt, ids in zip(found["prompts"], found["completions"], strict=True)]
        steps = [rows[i :: settings["num_minibatches"]] for i in range(settings["num_minibatches"])]
        mine = [_packs(share(step, ranks)[rank], settings["max_tokens"]) for step in steps]
        trained, forward = _timed(lambda m=mine: _train(engine, m)), _timed(lambda m=mine: _look(engine, m))
        if index:  # the first is warm-up
            tokens = sum(len(row) for row in rows)
            figures.append(
                {
                    "round_index": found["round_index"],
                    "train_seconds": trained,
                    "forward_seconds": forward,
                    "tokens": tokens,
                }
            )
    if rank == 0:
        Path(path).with_suffix(".figures.json").write_text(json.dumps(figures))


def share(rows: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """Rows dealt out to ranks, longest first, always to the one with the fewest tokens."""
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    for row in sorted(rows, key=len, reverse=True):
        min(shares, key=lambda dealt: sum(len(r) for r in dealt)).append(row)
    return shares


def _packs(rows: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """Rows, sorted by length, cut into packs of at most `max_tokens` (one row may exceed it)."""
    packs: list[list[list[int]]] = [[]]
    for row in sorted(rows, key=len):
        if packs[-1] and sum(len(r) for r in packs[-1]) + len(row) > max_tokens:
            packs.append([])
        packs[-1].append(row)
    return packs


def _engine(settings: dict[str, Any]) -> Any:
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("rows", _attend)
    dtype = getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(settings["rounds"][0]["policy"], dtype=dtype)
    model.set_attn_implementation("rows")
    parameters = sum(p.numel() for p in model.parameters())
    return deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": settings["zero_stage"],
                "reduce_bucket_size": parameters,
                "allgather_bucket_size": parameters,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
            "bf16": {"enabled": settings["dtype"] == "bfloat16"},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )[0]


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row of a pack: [1, heads, tokens, size] -> [1, tokens, heads, size]."""
    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    parts, start = [], 0
    for length, same in groupby(_lengths):
        count = len(list(same))
        rows = slice(start, start + count * length)
        heads, size = query.shape[1], query.shape[3]
        q, k, v = (
            t[0, :, rows].reshape(heads, count, length, size).transpose(0, 1) for t in (query, key, value)
        )  # fmt: skip
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        parts.append(out.transpose(1, 2).reshape(count * length, heads, size))
        start += count * length
    return torch.cat(parts).unsqueeze(0), None


def _loss(engine: Any, pack: list[list[int]]) -> torch.Tensor:
    """Cross-entropy of every token after the first of each row."""
    _lengths[:] = [len(row) for row in pack]
    ids = torch.tensor([[token for row in pack for token in row]])
    positions = torch.tensor([[place for row in pack for place in range(len(row))]])
    logits = engine(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    inner = (positions[0] > 0).nonzero().squeeze(1)
    return cross_entropy(logits[inner - 1].float(), ids[0, inner])


def _train(engine: Any, steps: list[list[list[list[int]]]]) -> None:
    engine.train()
    for packs in steps:
        for index, pack in enumerate(packs):
            engine.set_gradient_accumulation_boundary(is_boundary=index == len(packs) - 1)
            engine.backward(_loss(engine, pack))
            engine.step()


def _look(engine: Any, steps: list[list[list[list[int]]]]) -> None:
    engine.eval()
    with torch.no_grad():
        for packs in steps:
            for pack in packs:
                _loss(engine, pack)


def _timed(work: Any) -> float:
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(sys.argv[1])
