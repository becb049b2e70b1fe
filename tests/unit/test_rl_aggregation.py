"""stages/rl/aggregation.py: worked numbers, slow oracle, laws, gradients in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch.autograd import gradcheck

from stages.rl.aggregation import token_weights
from tests.unit import rl_oracles

NAMES = ["token_mean", "sequence_mean", "sequence_sum", "constant"]


def weigh(lengths: torch.Tensor, name: str, **given: object) -> torch.Tensor:
    return token_weights(lengths, aggregation=name, dtype=torch.float64, horizon_tokens=9, **given)  # type: ignore[arg-type]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_token_weights_by_hand() -> None:
    lengths = torch.tensor([1, 3, 4])
    # 8 tokens: 1/8 each.  3 rollouts: 1/(3*1), 1/(3*3), 1/(3*4)
    assert token_weights(lengths, aggregation="token_mean").tolist() == [0.125, 0.125, 0.125]
    found = token_weights(lengths, aggregation="sequence_mean", dtype=torch.float64)
    assert found.tolist() == pytest.approx([1 / 3, 1 / 9, 1 / 12], rel=1e-15)
    # 3 rollouts: 1/3 each, and 1/(3*10)
    assert token_weights(lengths, aggregation="sequence_sum").tolist() == pytest.approx([1 / 3] * 3)
    found = token_weights(lengths, aggregation="constant", horizon_tokens=10)
    assert found.tolist() == pytest.approx([1 / 30] * 3)


@pytest.mark.parametrize("aggregation", NAMES)
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 11])
def test_the_loss_of_a_step_does_not_depend_on_its_microbatches(aggregation: str, cut: int) -> None:
    rng = random.Random(2)
    losses = [[rng.uniform(-1, 1) for _ in range(rng.randint(1, 9))] for _ in range(11)]
    weights = weigh(torch.tensor([len(x) for x in losses]), aggregation)
    order = list(range(11))
    rng.shuffle(order)
    total = 0.0
    for start in range(0, 11, cut):
        rows = order[start : start + cut]
        flat = torch.tensor([x for row in rows for x in losses[row]], dtype=torch.float64)
        per_token = weights[rows].repeat_interleave(torch.tensor([len(losses[row]) for row in rows]))
        total += (per_token * flat).sum().item()
    assert total == pytest.approx(rl_oracles.aggregate(losses, aggregation=aggregation, horizon=9), abs=1e-13)


def test_token_weights_laws() -> None:
    lengths, order = torch.tensor([5, 1, 2, 8]), torch.tensor([3, 0, 1, 2])
    for name in ("token_mean", "sequence_mean"):
        weights = token_weights(lengths, aggregation=name, dtype=torch.float64)
        assert (weights * lengths).sum().item() == pytest.approx(1.0)  # a constant loss is its own mean
        assert torch.equal(token_weights(lengths[order], aggregation=name, dtype=torch.float64), weights[order])
    even = torch.tensor([4, 4])
    by_token, by_sequence = (token_weights(even, aggregation=name) for name in ("token_mean", "sequence_mean"))
    assert torch.equal(by_token, by_sequence)


def test_the_two_aggregations_can_differ_in_sign() -> None:
    losses = [[1.0], [-0.4, -0.4, -0.4, -0.4]]
    # tokens: (1 - 1.6) / 5 = -0.12;  sequences: (1 - 0.4) / 2 = 0.3
    assert rl_oracles.aggregate(losses, aggregation="token_mean") == pytest.approx(-0.12)
    assert rl_oracles.aggregate(losses, aggregation="sequence_mean") == pytest.approx(0.3)


def test_token_weights_pass_gradients_as_the_mean_does() -> None:
    x = randn(5, seed=1).requires_grad_()
    lengths = torch.tensor([2, 3])
    weights = token_weights(lengths, aggregation="sequence_mean", dtype=torch.float64).repeat_interleave(lengths)
    assert gradcheck(lambda y: (weights * y**2).sum(), (x,))
    ((x[:2] ** 2).mean() / 2 + (x[2:] ** 2).mean() / 2).backward()
    torch.testing.assert_close(x.grad, weights * 2 * x.detach())


def test_what_cannot_be_weighted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one token in each rollout, found \[2, 0\]"):
        token_weights(torch.tensor([2, 0]), aggregation="token_mean")
    with pytest.raises(ValueError, match=r"found \[\]"):
        token_weights(torch.tensor([], dtype=torch.long), aggregation="token_mean")
    with pytest.raises(ValueError, match="expected token_mean, sequence_mean, sequence_sum or constant, found 'sum'"):
        token_weights(torch.tensor([2]), aggregation="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="horizon_tokens: expected at least 1 for aggregation constant, found None"):
        token_weights(torch.tensor([2]), aggregation="constant")


@pytest.mark.parametrize("name", NAMES)
def test_rollouts_that_are_left_out_are_as_if_they_were_not_there(name: str) -> None:
    lengths, included = torch.tensor([5, 1, 2, 0, 8]), torch.tensor([1, 0, 1, 0, 1])
    found = weigh(lengths, name, included_B=included)
    assert found[[1, 3]].tolist() == [0.0, 0.0]
    assert torch.equal(found[[0, 2, 4]], weigh(lengths[[0, 2, 4]], name))
    assert not weigh(lengths[:2], name, included_B=torch.zeros(2)).any()  # nothing to learn from: no NaN


def test_sums_grow_with_length_and_the_constant_is_a_scaled_sum() -> None:
    lengths = torch.tensor([5, 1, 2, 8])
    total = weigh(lengths, "sequence_sum")
    assert torch.equal(total, weigh(lengths + 3, "sequence_sum"))  # a token's weight does not depend on lengths
    torch.testing.assert_close(weigh(lengths, "constant") * 9, total)
    order = torch.tensor([3, 0, 1, 2])
    for name in NAMES:
        assert torch.equal(weigh(lengths[order], name), weigh(lengths, name)[order])
