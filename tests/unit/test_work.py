"""What a plan computes, by hand; and floating-point operations as PyTorch counts them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from stages.models.batches import Cost, Microbatch, TokenBatch
from stages.models.language import TokenLogprobs
from stages.models.work import FORWARD, FORWARD_AND_BACKWARD, Work, deal, flops, work_of

CPU = torch.device("cpu")


def model(*, tied: bool = True) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return made


def test_work_by_hand() -> None:
    """A prompt of 3, completions of 2 and 1: 6 tokens; pairs 6 + (6 + 3) + (3 + 1). A filler of 1, with its prompt."""
    costs = [Cost(2, 3, "a"), Cost(1, 3, "a")]
    plan = [[Microbatch(rows=(0, 1))], [Microbatch(rows=(1,), is_filler=True)]]
    assert work_of(plan, costs) == Work(tokens=10, wasted=4, pairs=19 + 10)


def test_work_counts_what_a_batch_holds() -> None:
    batch = TokenBatch.of([[5, 6, 7], [5, 6, 7]], [[1, 2, 3], [4, 9]], device=CPU)
    work = work_of([[Microbatch(rows=(0, 1))]], [Cost(2, 3, "a"), Cost(1, 3, "a")])
    assert work.tokens == len(batch.packed.input_ids_N)


def test_flops_are_those_that_pytorch_counts() -> None:
    """Of matrices: within a twentieth, as the output embedding counts for every token. Attention is not seen here."""
    lm = model()
    batch = TokenBatch.of([[5] * 20] * 8, [[index + 3] * 60 for index in range(8)], device=CPU)
    tokens = work_of([[Microbatch(rows=tuple(range(8)))]], [Cost(59, 20, "a")] * 8).tokens
    work = Work(tokens=tokens, wasted=0, pairs=0)
    module = TokenLogprobs(lm)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        module(batch.packed, batch.select_M, batch.targets_M, 1.0)
    with FlopCounterMode(display=False) as both:
        module(batch.packed, batch.select_M, batch.targets_M, 1.0)[0].sum().backward()
    assert abs(flops(work, lm, passes=FORWARD) / forward.get_total_flops() - 1) < 0.05
    assert abs(flops(work, lm, passes=FORWARD_AND_BACKWARD) / both.get_total_flops() - 1) < 0.05


def test_attention_costs_four_per_pair_layer_and_unit_of_width() -> None:
    """The scores and their product with the values, a multiplication and an addition each."""
    alone, paired = (flops(Work(10, 0, pairs), model(), passes=FORWARD) for pairs in (0, 7))
    assert paired - alone == 4 * 7 * 2 * 64


def test_a_tied_output_embedding_costs_what_an_untied_one_costs() -> None:
    work = Work(tokens=100, wasted=0, pairs=1000)
    assert flops(work, model(), passes=FORWARD) == flops(work, model(tied=False), passes=FORWARD)


def test_deal_gives_a_rank_its_share_and_counts_that_of_all() -> None:
    counted: list[tuple[int, int, float]] = []
    lm = model()
    share = deal(
        [Cost(4), Cost(3), Cost(2)],
        max_tokens=100,
        rank=1,
        world_size=2,
        models=[lm, lm],
        passes=FORWARD,
        count=lambda *figures: counted.append(figures),
    )
    assert share == [Microbatch(rows=(1, 2))]
    (tokens, wasted, operations), *rest = counted
    assert (tokens, wasted, rest) == (18, 0, [])
    assert operations == 2 * flops(Work(9, 0, 10 + 6 + 3), lm, passes=FORWARD)


def test_a_model_that_only_looks_is_counted_for_one_pass() -> None:
    counted: list[float] = []
    moved, still = model(), model(tied=False)
    deal(
        [Cost(4), Cost(3)],
        max_tokens=100,
        rank=0,
        world_size=1,
        models=[still, moved],
        passes=FORWARD_AND_BACKWARD,
        count=lambda tokens, wasted, operations: counted.append(operations),
        forward_only=[still],
    )
    one = flops(Work(7, 0, 10 + 6), moved, passes=FORWARD)
    assert counted == [pytest.approx(4 * one)]
