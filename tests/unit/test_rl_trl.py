"""Where TRL is installed, its own functions on our numbers. It is no dependency: the loops in rl_peers.py always run.

TRL computes Bessel's correction in float32, so standard deviations agree to 1e-7 of their size.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.rl.advantages import group_advantages
from stages.rl.aggregation import token_weights
from stages.rl.kl import KlLimits, kl_estimate
from stages.rl.losses import policy_loss
from stages.rl.masked import masked_mean, masked_variance
from stages.rl.whitening import whiten
from tests.unit.rl_tensors import LENGTHS, MASK_BT, close, random_BT

pytest.importorskip("trl", reason="TRL is not installed")

LOSSES = [  # TRL's loss_type and level, our loss, aggregation and clips
    ("dapo", "token", "clip", "token_mean", 0.2, 0.2),
    ("grpo", "token", "clip", "sequence_mean", 0.2, 0.28),
    ("dr_grpo", "token", "clip", "constant", 0.2, 0.2),
    ("grpo", "sequence", "gspo", "sequence_mean", 0.2, 0.2),
    ("cispo", "token", "cispo", "token_mean", 1.0, 1.0),
]


def test_whitening_is_trls() -> None:
    ppo = pytest.importorskip("trl.experimental.ppo.ppo_trainer", reason="this TRL has no PPO", exc_type=ImportError)
    x = random_BT(1)
    close(masked_mean(x, mask=MASK_BT), ppo.masked_mean(x, MASK_BT))
    close(masked_variance(x, mask=MASK_BT), ppo.masked_var(x, MASK_BT), tolerance=1e-7)
    close(whiten(x, mask_BT=MASK_BT)[MASK_BT], ppo.masked_whiten(x, MASK_BT)[MASK_BT], tolerance=1e-7)
    kept = ppo.masked_whiten(x, MASK_BT, shift_mean=False)
    close(whiten(x, mask_BT=MASK_BT, keep_mean=True)[MASK_BT], kept[MASK_BT], tolerance=1e-7)


def test_the_groups_deviation_is_trls() -> None:
    utils = pytest.importorskip("trl.trainer.utils", reason="TRL cannot be imported", exc_type=ImportError)
    rewards = torch.tensor([1.0, -2.0, 13.0, 0.25, 0.3, 0.3, 0.3, 0.3], dtype=torch.float64)
    grouped = rewards.view(2, 4)
    theirs = (grouped - grouped.mean(1, keepdim=True)) / (utils.nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    found = group_advantages(rewards, group_B=torch.arange(8) // 4, scale_by_std=True, eps=1e-4)
    close(found, theirs.flatten(), tolerance=1e-7)


def trls_loss(logprobs: Tensor, old: Tensor, ref: Tensor, advantages_B: Tensor, **settings: Any) -> Tensor:
    """GRPOTrainer's own loss of a batch, on a trainer that has nothing but what its loss reads."""
    pytest.importorskip("trl", minversion="1.16", reason="what TRL's loss reads changes between versions")
    grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL cannot be imported", exc_type=ImportError)
    trainer = object.__new__(grpo.GRPOTrainer)
    usual = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": 9,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "model": SimpleNamespace(training=False),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    }
    for name, value in (usual | settings).items():
        object.__setattr__(trainer, name, value)
    ids = torch.ones_like(MASK_BT, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": MASK_BT.long(),
        "advantages": advantages_B,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": MASK_BT.sum(),
    }
    loss: Tensor = trainer._compute_loss(None, inputs)
    return loss


@pytest.mark.parametrize(("kind", "level", "ours", "aggregation", "low", "high"), LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_losses_and_gradients_are_trls(
    kind: str, level: str, ours: Any, aggregation: Any, low: float, high: float, beta: float
) -> None:
    old, ref, lengths = random_BT(2), random_BT(4), torch.tensor(LENGTHS)
    new, advantages_B = (old + 0.5 * random_BT(1)).requires_grad_(), torch.tensor([1.0, -2.0, 0.5, -0.3]).double()
    theirs = trls_loss(
        new,
        old,
        ref,
        advantages_B,
        loss_type=kind,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=low,
        epsilon_high=1 + high if kind == "cispo" else high,
    )
    flat = policy_loss(
        ours,
        new[MASK_BT],
        old_logprobs_N=old[MASK_BT],
        advantages_N=advantages_B.repeat_interleave(lengths),
        lengths_B=lengths,
        clip_low=low,
        clip_high=high,
        log_ratio_limit=None,
    ).loss
    kl = kl_estimate(new[MASK_BT], ref_logprobs=ref[MASK_BT], estimator="k3", limits=KlLimits(log_ratio=None))
    weights = token_weights(lengths, aggregation=aggregation, dtype=torch.float64, horizon_tokens=9)
    loss = (weights.repeat_interleave(lengths) * (flat + beta * kl)).sum()
    close(loss.detach(), theirs.detach())
    (expected,), (found,) = torch.autograd.grad(theirs, new), torch.autograd.grad(loss, new)
    close(found, expected)
