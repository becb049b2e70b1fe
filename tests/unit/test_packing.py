"""Packed rows say what the library says of each row alone: values and gradients, for every family and shape."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

import stages.models.language as language
from stages.artifacts.errors import InputError
from stages.models.batches import TokenBatch
from stages.models.language import TokenLogprobs
from stages.models.packing import pack
from stages.models.scalar import score_sequences

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 300,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=5),
}
Rows = list[tuple[list[int], list[int]]]


def model_of(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=dtype)
    return model


def rollouts(groups: int, size: int, *, longest: int = 14, seed: int = 0) -> Rows:
    """Groups of completions of one prompt, one-token ones among them, in mixed order."""
    generator, rows = random.Random(seed), []
    for _ in range(groups):
        prompt = [generator.randrange(3, 290) for _ in range(generator.randint(1, 20))]
        for _ in range(size):
            rows.append((prompt, [generator.randrange(3, 290) for _ in range(generator.randint(1, longest))]))
    generator.shuffle(rows)
    return rows


def one_by_one(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """Logprobs of the completion tokens from the library's own forward pass of each row alone."""
    found = []
    for prompt, completion in rows:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(logprobs.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1))
    return torch.cat(found)


def packed(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    batch = TokenBatch.of([p for p, _ in rows], [c for _, c in rows], device=CPU)
    logprobs: torch.Tensor = TokenLogprobs(model)(batch.packed, batch.select_M, batch.targets_M, 1.0)[0]
    return logprobs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunked", [False, True])
def test_logprobs_and_gradients_are_those_of_each_row_alone(
    family: str, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rollouts(6, 4)
    theirs, ours = model_of(family), model_of(family)
    if chunked:
        monkeypatch.setattr(language, "_LOGITS", 7 * 300)
    expected, found = one_by_one(theirs, rows), packed(ours, rows)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)  # the logits are float32
    weights = torch.randn(len(expected), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for (name, one), other in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_float32_losses_agree_packed_and_alone() -> None:
    rows = rollouts(12, 4, longest=200, seed=3)
    expected = -one_by_one(model_of("llama", torch.float32), rows).mean().detach()
    found = -packed(model_of("llama", torch.float32), rows).mean().detach()
    assert abs(float(found) - float(expected)) < 1e-5


def test_a_row_does_not_see_its_neighbours() -> None:
    """Another row's tokens change no bit of what a row of the same shape gives."""
    rows = rollouts(4, 2, seed=5)
    others = [*rows[:1], *[(p, [(t + 1) % 290 + 3 for t in c]) for p, c in rows[1:]]]
    length = len(rows[0][1])
    assert torch.equal(packed(model_of("llama"), rows)[:length], packed(model_of("llama"), others)[:length])


def test_ragged_rows_waste_little_attention() -> None:
    """Lengths with a heavy tail: blocks hold at most a third more cells than there are."""
    generator = random.Random(0)
    rows = [([1] * 20, [2] * min(256, int(16 * generator.paretovariate(1.0)))) for _ in range(256)]
    blocks = pack(rows, device=CPU).blocks.blocks
    cells = sum(block.query_SQ.numel() * block.key_SK.shape[1] for block in blocks)
    real = sum(len(c) * (len(p) + len(c)) for p, c in rows) + 20 * 20
    assert cells < 1.34 * real
    assert len(blocks) < 12


def test_scores_are_the_librarys() -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES["llama"])
    config.num_labels, config.pad_token_id = 1, 0
    theirs = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    rows = [([], [5, 6, 7]), *rollouts(3, 3), ([5, 6], [])]
    with torch.no_grad():
        expected = [float(theirs(input_ids=torch.tensor([p + c])).logits[0, 0]) for p, c in rows]
    for limit in (1, 30, 10_000):
        found = score_sequences(copy.deepcopy(theirs), rows, max_tokens_per_microbatch=limit)
        assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_attention_that_is_more_than_causal_is_refused() -> None:
    config = Gemma2Config(**SHAPE, head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        InputError, match="Gemma2Attention: expected plain causal attention, found that it uses softcap"
    ):
        packed(model, rollouts(1, 1))


def test_a_family_that_hands_nothing_on_to_attention_is_refused() -> None:
    """Without the packing every row would see its neighbours."""
    model = model_of("llama")
    TokenLogprobs(model)
    with pytest.raises(
        InputError, match="LlamaAttention: expected plain causal attention, found that it does not hand"
    ):
        model(input_ids=torch.tensor([[1, 2, 3]]))
