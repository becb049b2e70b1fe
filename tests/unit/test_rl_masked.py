"""stages/rl/masked.py and whitening: worked numbers, slow oracles, laws, gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from stages.rl.masked import explained_variance, masked_mean, masked_variance
from stages.rl.whitening import whiten
from tests.unit import rl_oracles
from tests.unit.rl_tensors import MASK_BT, close, f64, random_BT


def test_whiten_by_hand() -> None:
    x, mask = f64([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    # 1, 2, 3: mean 2, unbiased variance 1, biased 2/3
    close(whiten(x, mask_BT=mask, eps=0.0), [[-1, 0, 0], [1, 0, 0]])
    biased = whiten(x, mask_BT=mask, variance="biased", eps=0.0)
    close(biased, [[-math.sqrt(1.5), 0, 0], [math.sqrt(1.5), 0, 0]])


def test_how_eps_enters_by_hand() -> None:
    x, mask = f64([[1.0, 2.0, 3.0]]), torch.tensor([[1, 1, 1]])
    # variance 1: sqrt(1 + 3) = 2; max(1, 0.25) = 1 and max(1, 4) = 4
    close(whiten(x, mask_BT=mask, eps=3.0), [[-0.5, 0, 0.5]])
    close(whiten(x, mask_BT=mask, eps=0.25, eps_rule="maximum"), [[-1, 0, 1]])
    close(whiten(x, mask_BT=mask, eps=4.0, eps_rule="maximum"), [[-0.5, 0, 0.5]])
    close(whiten(x, mask_BT=mask, eps=3.0, keep_mean=True), [[1.5, 2, 2.5]])  # TRL's whitening of rewards
    with pytest.raises(ValueError, match="eps_rule: expected add or maximum, found 'clamp'"):
        whiten(x, mask_BT=mask, eps_rule="clamp")  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["add", "maximum"])
def test_both_eps_rules_agree_with_the_oracle(rule: str) -> None:
    x = random_BT(6)
    for eps in (1e-8, 0.5, 5.0):
        expected = rl_oracles.whiten(x[MASK_BT].tolist(), eps=eps, eps_rule=rule)
        close(whiten(x, mask_BT=MASK_BT, eps=eps, eps_rule=rule)[MASK_BT], expected)  # type: ignore[arg-type]
        assert gradcheck(
            lambda y, e=eps: whiten(y, mask_BT=MASK_BT, eps=e, eps_rule=rule), (x.clone().requires_grad_(),)
        )


@pytest.mark.parametrize(("variance", "correction"), [("unbiased", 1), ("biased", 0)])
def test_masked_statistics_agree_with_the_oracle(variance: str, correction: int) -> None:
    x = random_BT(6)
    xs = x[MASK_BT].tolist()
    close(masked_mean(x, mask=MASK_BT), rl_oracles.mean(xs))
    close(masked_variance(x, mask=MASK_BT, variance=variance), rl_oracles.variance(xs, correction=correction))
    close(whiten(x, mask_BT=MASK_BT, variance=variance)[MASK_BT], rl_oracles.whiten(xs, correction=correction))


def test_whiten_laws() -> None:
    x, order = random_BT(6), torch.tensor([3, 1, 0, 2])
    white = whiten(x, mask_BT=MASK_BT)
    close(masked_mean(white, mask=MASK_BT), 0.0)
    close(masked_variance(white, mask=MASK_BT), 1.0, tolerance=1e-7)  # eps costs 1e-8
    close(whiten(x + 40, mask_BT=MASK_BT), white, tolerance=1e-10)
    close(whiten(x * 8, mask_BT=MASK_BT), white, tolerance=1e-7)
    close(whiten(-x, mask_BT=MASK_BT), -white)
    close(whiten(x[order], mask_BT=MASK_BT[order]), white[order])
    dirty = x.where(MASK_BT, torch.tensor(math.nan, dtype=torch.float64))
    close(whiten(dirty, mask_BT=MASK_BT), white)


def test_statistics_of_two_values_of_one_and_of_none() -> None:
    x = f64([[4.0, 1.0, 9.0]])
    two, one, none = (torch.tensor([[1, n > 1, 0]]) * (n > 0) for n in (2, 1, 0))
    # 4, 1: mean 2.5, deviations +-1.5, squares sum to 4.5
    close(masked_mean(x, mask=two), 2.5)
    close(masked_variance(x, mask=two), 4.5)
    close(masked_variance(x, mask=two, variance="biased"), 2.25)
    close(masked_mean(x, mask=one), 4.0)
    for variance in ("unbiased", "biased"):
        close(masked_variance(x, mask=one, variance=variance), 0.0)
        close(masked_variance(x, mask=none, variance=variance), 0.0)
    close(masked_mean(x, mask=none), 0.0)


def test_whiten_of_one_value_or_of_none_is_zero() -> None:
    one = torch.tensor([[1, 0]])
    for variance in ("unbiased", "biased"):
        close(whiten(f64([[4.0, 1.0]]), mask_BT=one, variance=variance), [[0, 0]])
        close(whiten(f64([[4.0, 1.0]]), mask_BT=0 * one, variance=variance), [[0, 0]])


def test_masked_statistics_gradients() -> None:
    x = random_BT(6).requires_grad_()
    for variance in ("unbiased", "biased"):
        assert gradcheck(lambda y, v=variance: whiten(y, mask_BT=MASK_BT, variance=v), (x,))
        assert gradcheck(lambda y, v=variance: masked_variance(y, mask=MASK_BT, variance=v), (x,))
    assert gradcheck(lambda y: masked_mean(y, mask=MASK_BT), (x,))


def test_explained_variance_by_hand_and_by_oracle() -> None:
    mask = torch.tensor([[1, 1, 1, 0]])
    returns, values = f64([[0.0, 1.0, 2.0, 9.0]]), f64([[0.0, 1.0, 1.0, -9.0]])
    # Var[0, 1, 2] = 1; residuals 0, 0, 1: Var = 1/3; 1 - 1/3
    close(explained_variance(values, returns_BT=returns, mask_BT=mask), 2 / 3)
    x, y = random_BT(1), random_BT(2)
    expected = rl_oracles.explained_variance(x[MASK_BT].tolist(), y[MASK_BT].tolist())
    close(explained_variance(x, returns_BT=y, mask_BT=MASK_BT), expected)


def test_explained_variance_laws() -> None:
    returns, values = random_BT(1), random_BT(2)
    close(explained_variance(returns, returns_BT=returns, mask_BT=MASK_BT), 1.0)
    close(explained_variance(returns + 5, returns_BT=returns, mask_BT=MASK_BT), 1.0)  # a bias is not variance
    close(explained_variance(0 * returns + 3, returns_BT=returns, mask_BT=MASK_BT), 0.0)
    close(explained_variance(-returns, returns_BT=returns, mask_BT=MASK_BT), -3.0)  # Var[2R] = 4 Var[R]
    close(explained_variance(values, returns_BT=0 * returns, mask_BT=MASK_BT), 0.0)
    checked = values.clone().requires_grad_()
    assert gradcheck(lambda v: explained_variance(v, returns_BT=returns, mask_BT=MASK_BT), (checked,))
