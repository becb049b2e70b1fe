"""How much a model has to compute for rows: tokens, padding and floating-point operations, known before it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from stages.models.batches import Cost, Microbatch, microbatches

Count = Callable[[int, int, float], None]
FORWARD, FORWARD_AND_BACKWARD = 1, 3
"""Passes over the weights: the backward pass costs two forward ones."""


@dataclass(frozen=True)
class Work:
    """tokens: each computed once. wasted: of them, those of filler microbatches. pairs: of tokens that attend."""

    tokens: int
    wasted: int
    pairs: int


def work_of(plan: Sequence[Sequence[Microbatch]], costs: Sequence[Cost]) -> Work:
    """What all ranks together compute for a plan that microbatches() made."""
    tokens = wasted = pairs = 0
    for batch in (batch for batches in plan for batch in batches):
        shared = {costs[row].prompt: costs[row].shared for row in batch.rows if costs[row].prompt is not None}
        here = sum(shared.values()) + sum(costs[row].own for row in batch.rows)
        tokens += here
        wasted += here if batch.is_filler else 0
        pairs += sum(length * (length + 1) // 2 for length in shared.values())
        pairs += sum(
            costs[row].own * costs[row].shared + costs[row].own * (costs[row].own + 1) // 2 for row in batch.rows
        )
    return Work(tokens=tokens, wasted=wasted, pairs=pairs)


def flops(work: Work, model: PreTrainedModel, *, passes: int) -> float:
    """Floating-point operations of `passes` passes: two per weight and token, four per pair, layer and unit of width.

    Weights are those of matrices outside the embeddings, and of the output embedding, where there is one, for every
    token (Kaplan et al. 2020, table 1); with adapters, frozen ones count like others.
    """
    config = model.config
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings)
    output = model.get_output_embeddings()
    if output is not None and id(output.weight) in embeddings:
        weights += output.weight.numel()
    width = config.hidden_size * config.num_hidden_layers
    operations: float = passes * (2.0 * weights * work.tokens + 4.0 * width * work.pairs)
    return operations


def deal(
    costs: Sequence[Cost],
    *,
    max_tokens: int,
    rank: int,
    world_size: int,
    models: Sequence[PreTrainedModel],
    passes: int,
    count: Count,
    forward_only: Sequence[PreTrainedModel] = (),
) -> list[Microbatch]:
    """This rank's microbatches; count(tokens, wasted, flops) is told what all ranks will compute in `models`.

    forward_only: of `models`, those that make one pass, whatever `passes` says.
    """
    plan = microbatches(costs, max_tokens=max_tokens, world_size=world_size)
    work = work_of(plan, costs)
    times = len(models)
    operations = sum(flops(work, m, passes=FORWARD if m in forward_only else passes) for m in models)
    count(times * work.tokens, times * work.wasted, operations)
    return plan[rank]
