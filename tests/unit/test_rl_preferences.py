"""stages/rl/preferences.py: worked numbers, slow oracles, laws, gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import softplus

from stages.rl.preferences import bradley_terry_loss, centering_loss
from tests.unit import rl_oracles
from tests.unit.rl_tensors import close, f64

SETTINGS = [(0.0, 0.0), (0.7, 0.0), (0.0, 0.1), (0.7, 0.3)]


def scores(seed: int) -> Tensor:
    return 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CHOSEN, REJECTED = scores(1), scores(2)


def loss(chosen: Tensor, rejected: Tensor, margin: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    return bradley_terry_loss(chosen, rejected_B=rejected, margin=margin, label_smoothing=label_smoothing)


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = f64(2.0, 0.0), f64(0.5, 0.0)
    # without either: d = 1.5 and 0.  -log sigmoid(1.5) = -log 0.8175745 = 0.2014133;  -log 0.5 = 0.6931472
    close(loss(chosen, rejected), [0.2014132780, 0.6931471806], tolerance=1e-10)
    # margin 0.5: d = 1 and -0.5.  -log 0.7310586 = 0.3132617;  -log 0.3775407 = 0.9740770
    close(loss(chosen, rejected, 0.5), [0.3132616875, 0.9740769842], tolerance=1e-10)
    # and label_smoothing 0.1: -log sigmoid(-1) = 1.3132617, -log sigmoid(0.5) = 0.4740770
    # 0.9 * 0.3132617 + 0.1 * 1.3132617 = 0.2819355 + 0.1313262
    # 0.9 * 0.9740770 + 0.1 * 0.4740770 = 0.8766693 + 0.0474077
    close(loss(chosen, rejected, 0.5, 0.1), [0.4132616875, 0.9240769842], tolerance=1e-10)


@pytest.mark.parametrize(("margin", "label_smoothing"), SETTINGS)
def test_bradley_terry_agrees_with_the_oracle(margin: float, label_smoothing: float) -> None:
    expected = rl_oracles.bradley_terry(
        CHOSEN.tolist(), REJECTED.tolist(), margin=margin, label_smoothing=label_smoothing
    )
    close(loss(CHOSEN, REJECTED, margin, label_smoothing), expected, tolerance=1e-12)


@pytest.mark.parametrize(("margin", "label_smoothing"), SETTINGS)
def test_bradley_terry_laws(margin: float, label_smoothing: float) -> None:
    found = loss(CHOSEN, REJECTED, margin, label_smoothing)
    close(loss(CHOSEN + 5, REJECTED + 5, margin, label_smoothing), found)  # only differences count
    close(loss(CHOSEN + margin, REJECTED, margin, label_smoothing), loss(CHOSEN, REJECTED, 0.0, label_smoothing))
    close(loss(CHOSEN, REJECTED, 0.0, label_smoothing), loss(REJECTED, CHOSEN, 0.0, 1 - label_smoothing))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loss(CHOSEN[order], REJECTED[order], margin, label_smoothing), found[order])
    # a second wording: softplus(-d) + eps * d
    logit = CHOSEN - REJECTED - margin
    close(found, softplus(-logit) + label_smoothing * logit)
    more = loss(CHOSEN, REJECTED, margin + 0.5, label_smoothing)
    assert label_smoothing > 0.0 or (more > found).all()  # a wider margin asks for more


@pytest.mark.parametrize("label_smoothing", [0.1, 0.3])
def test_smoothed_labels_have_a_best_distance_and_their_entropy_as_floor(label_smoothing: float) -> None:
    margin, eps = 0.7, label_smoothing
    best = margin + math.log((1 - eps) / eps)
    chosen = f64(best, best + 0.1, best - 0.1).requires_grad_()
    found = loss(chosen, torch.zeros(3).double(), margin, eps)
    floor = -(1 - eps) * math.log(1 - eps) - eps * math.log(eps)
    assert found[0].item() == pytest.approx(floor, abs=1e-12) and found[1] > floor and found[2] > floor
    found.sum().backward()
    assert chosen.grad is not None
    slopes = chosen.grad.tolist()
    assert slopes[0] == pytest.approx(0.0, abs=1e-12) and slopes[1] > 0 > slopes[2]


def test_bradley_terry_does_not_overflow() -> None:
    chosen, rejected = torch.tensor([900.0, -900.0]), torch.zeros(2)
    assert loss(chosen, rejected).tolist() == [0.0, 900.0]
    assert loss(chosen, rejected, 0.0, 0.1).tolist() == pytest.approx([90.0, 810.0])


@pytest.mark.parametrize(("margin", "label_smoothing"), SETTINGS)
def test_bradley_terry_gradient(margin: float, label_smoothing: float) -> None:
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    assert gradcheck(lambda a, b: loss(a, b, margin, label_smoothing), (chosen, rejected))
    loss(chosen, rejected, margin, label_smoothing).sum().backward()
    expected = torch.sigmoid(CHOSEN - REJECTED - margin) - (1 - label_smoothing)
    assert chosen.grad is not None and rejected.grad is not None
    close(chosen.grad, expected)
    close(rejected.grad, -expected)  # the middle of a pair is not pulled anywhere


def test_nothing_asked_for_is_the_plain_loss_bit_for_bit() -> None:
    """So that the defaults are what train_reward_model has always done."""
    chosen, rejected = (x.float().requires_grad_() for x in (CHOSEN, REJECTED))
    plain = -torch.nn.functional.logsigmoid(chosen - rejected)
    assert torch.equal(loss(chosen, rejected), plain)
    grads = [torch.autograd.grad(made.sum(), (chosen, rejected)) for made in (plain, loss(chosen, rejected))]
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_centering() -> None:
    close(centering_loss(f64(2.0, -1.0), rejected_B=f64(0.5, 1.0)), [6.25, 0.0])  # (2 + 0.5)^2, (-1 + 1)^2
    found = centering_loss(CHOSEN, rejected_B=REJECTED)
    close(found, rl_oracles.centering(CHOSEN.tolist(), REJECTED.tolist()), tolerance=1e-10)
    assert torch.equal(found, centering_loss(REJECTED, rejected_B=CHOSEN))
    middle = (CHOSEN + REJECTED) / 2
    close(centering_loss(CHOSEN - middle, rejected_B=REJECTED - middle), torch.zeros(50), tolerance=1e-24)
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    assert gradcheck(lambda a, b: centering_loss(a, rejected_B=b), (chosen, rejected))
    centering_loss(chosen, rejected_B=rejected).sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    close(chosen.grad, 2 * (CHOSEN + REJECTED))
    assert torch.equal(chosen.grad, rejected.grad)
