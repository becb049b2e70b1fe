"""stages/rl/mismatch.py: worked numbers, slow oracle, laws, no gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stages.rl.mismatch import mismatch, mismatch_weights
from tests.unit import rl_oracles

LENGTHS = torch.tensor([4, 1, 7, 3])
FORMS = [
    ("token", "truncate"),
    ("token", "mask"),
    ("sequence", "truncate"),
    ("sequence", "mask"),
    ("sequence_mean", "mask"),
]


def randn(seed: int) -> Tensor:
    return torch.randn(15, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(old: Tensor, rollout: Tensor, level: str, form: str, low: float = 0.5, high: float = 2.0) -> Tensor:
    return mismatch_weights(
        old,
        rollout_logprobs_N=rollout,
        lengths_B=LENGTHS if old.numel() == 15 else torch.tensor([2, 1]),
        level=level,  # type: ignore[arg-type]
        form=form,  # type: ignore[arg-type]
        low=low,
        high=high,
    )


def test_weights_by_hand() -> None:
    old = torch.tensor([2.0, 3.0, 0.25]).double().log()  # ratios 2, 3 and, alone, 0.25
    rollout = torch.zeros(3).double()

    def found(level: str, form: str, low: float, high: float) -> list[float]:
        return weights(old, rollout, level, form, low, high).tolist()

    assert found("token", "truncate", 0.0, 2.5) == pytest.approx([2, 2.5, 0.25])
    assert found("token", "truncate", 0.5, 2.5) == pytest.approx([2, 2.5, 0.5])
    assert found("token", "mask", 0.5, 2.5) == pytest.approx([2, 0, 0])
    assert found("sequence", "truncate", 0.0, 5.0) == pytest.approx([5, 5, 0.25])  # 2 * 3 = 6
    assert found("sequence", "mask", 0.0, 5.0) == pytest.approx([0, 0, 0.25])
    # sqrt(6) = 2.449 lies inside: the tokens keep their own weights; 0.25 does not
    assert found("sequence_mean", "mask", 0.5, 2.5) == pytest.approx([2, 3, 0])


@pytest.mark.parametrize(("level", "form"), FORMS)
def test_weights_agree_with_the_oracle(level: str, form: str) -> None:
    old, rollout = randn(1), randn(2)
    found = weights(old, rollout, level, form).split(LENGTHS.tolist())
    for row, x, y in zip(found, old.split(LENGTHS.tolist()), rollout.split(LENGTHS.tolist()), strict=True):
        expected = rl_oracles.mismatch_weights(x.tolist(), y.tolist(), level=level, form=form, low=0.5, high=2.0)
        assert row.tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("level", "form"), FORMS)
def test_laws_of_the_weights(level: str, form: str) -> None:
    old, rollout = randn(1).requires_grad_(), randn(2).requires_grad_()
    found = weights(old, rollout, level, form)
    assert not found.requires_grad
    assert weights(old, old, level, form).tolist() == [1.0] * 15  # no mismatch, no correction
    torch.testing.assert_close(weights(old - 3, rollout - 3, level, form), found)
    assert (found >= 0).all() and weights(old + 900, rollout, level, form).isfinite().all()
    if level != "sequence_mean":
        assert (found <= 2.0).all()
    free = weights(old, rollout, level, form, 0.0, 1e9)
    if level != "sequence":
        torch.testing.assert_close(free, (old - rollout).exp().detach())


def test_the_mismatch_by_hand_and_its_laws() -> None:
    found = mismatch(torch.tensor([-1.0, -2.0]).double(), rollout_logprobs=torch.tensor([-1.5, -2.0]).double())
    # d = rollout - old = -0.5: k3 = exp(0.5) - 1 - 0.5 = 0.1487213; weight exp(0.5)
    assert found.kl.tolist() == pytest.approx([0.1487213, 0.0], abs=1e-7)
    assert found.gap.tolist() == [0.5, 0.0]
    assert found.weight.tolist() == pytest.approx([math.exp(0.5), 1.0])
    old, rollout = randn(1).requires_grad_(), randn(2)
    measured = mismatch(old, rollout_logprobs=rollout)
    assert (measured.kl >= 0).all() and not measured.kl.requires_grad and not measured.weight.requires_grad
    torch.testing.assert_close(measured.gap, mismatch(rollout, rollout_logprobs=old).gap)


def test_what_makes_no_weights_is_named() -> None:
    with pytest.raises(ValueError, match="level: expected token, sequence or sequence_mean, found 'batch'"):
        weights(randn(1), randn(2), "batch", "mask")
    with pytest.raises(ValueError, match="form: expected mask or truncate, found 'drop'"):
        weights(randn(1), randn(2), "token", "drop")
    with pytest.raises(ValueError, match="form: expected mask, found 'truncate'"):
        weights(randn(1), randn(2), "sequence_mean", "truncate")
