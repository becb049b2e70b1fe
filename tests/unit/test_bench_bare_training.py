"""The floor of training computes what a padded batch computes: otherwise it would be no floor of the same work."""

from __future__ import annotations

import random

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench import bare_training


def test_a_pack_has_the_loss_of_its_rows_one_by_one() -> None:
    ALL_ATTENTION_FUNCTIONS.register("rows", bare_training._attend)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    chance = random.Random(0)
    pack = [[chance.randrange(50) for _ in range(length)] for length in (5, 2, 7, 5, 3)]
    pack.sort(key=len)
    losses = []
    for row in pack:
        ids = torch.tensor([row])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        losses.append(cross_entropy(logits, ids[0, 1:], reduction="sum"))
    expected = torch.stack(losses).sum() / sum(len(row) - 1 for row in pack)
    model.set_attn_implementation("rows")
    found = bare_training._loss(model, pack)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_every_row_is_in_exactly_one_pack_of_exactly_one_rank() -> None:
    chance = random.Random(0)
    rows = [[index] * chance.randint(1, 40) for index in range(100)]
    shares = bare_training.share(rows, 2)
    packs = [bare_training._packs(dealt, 64) for dealt in shares]
    found = sorted(row for dealt in packs for pack in dealt for row in pack)
    assert found == sorted(rows)
    tokens = [sum(len(row) for row in dealt) for dealt in shares]
    assert max(tokens) <= 1.05 * min(tokens)
    assert all(sum(len(row) for row in pack) <= 64 for dealt in packs for pack in dealt)
