"""`python -m stages.rl.reference`: what a convention makes of one case, in float64, as JSON on standard output.

For comparing the equations with another implementation; docs/mathematics.md has a worked example. Bad input ends with
exit code 2 and one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from configs.conventions import GRPO, PPO, ConventionName, GrpoConvention, PpoConvention
from stages.rl.aggregation import token_weights
from stages.rl.case import Case, CaseError, read_case, with_overrides
from stages.rl.credit import Credit, KlPenalty, group_credit, ppo_credit
from stages.rl.kl import KlLimits, kl_estimate
from stages.rl.losses import policy_loss_clip, value_loss_clip
from stages.rl.rewards import first_pad_included
from stages.rl.whitening import Whitening


def evaluate_ppo(case: Case, convention: PpoConvention) -> dict[str, Any]:
    """The figures of PPO under `convention`, the case's hyperparameters in place of its own. Raises CaseError."""
    convention = with_overrides(convention, case)
    credit = ppo_credit(
        case.rewards_B,
        mask_BT=case.mask_BT,
        values_BT=case.column("values"),
        kl=_penalty(case, convention),
        discount=convention.discount,
        gae_lambda=convention.gae_lambda,
        whitening=_whitening(convention),
        reward_clip=convention.reward_clip,
        reward_placement=convention.reward_placement,
        gaps=convention.gaps,
    )
    assert credit.returns_BT is not None
    loss = value_loss_clip(
        case.column("new_values"),
        values=case.column("values"),
        returns=credit.returns_BT,
        value_clip=convention.value_clip,
    ).loss
    is_longer = convention.reward_placement == "first_pad"
    mask_BT = first_pad_included(case.mask_BT) if is_longer else case.mask_BT
    value_loss = _aggregate(loss, mask_BT=mask_BT, convention=convention)
    return _figures(case, convention, credit) | {
        "returns": credit.returns_BT.tolist(),
        "value_loss": value_loss.item(),
    }


def evaluate_grpo(case: Case, convention: GrpoConvention) -> dict[str, Any]:
    """The figures of the group method under `convention`; value_loss is null. Raises CaseError.

    returns: what is summed backwards where the KL is, else the advantages, as verl has it.
    """
    convention = with_overrides(convention, case)
    credit = group_credit(
        case.rewards_B,
        group_B=case.group_B(),
        mask_BT=case.mask_BT,
        kl=_penalty(case, convention),
        scale_by_std=convention.scale_by_std,
        std_eps=convention.std_eps,
        singleton=convention.singleton,
        reward_clip=convention.reward_clip,
        cumulate_kl=convention.cumulate_kl,
    )
    return _figures(case, convention, credit) | {"returns": credit.advantages_BT.tolist(), "value_loss": None}


def _whitening(convention: PpoConvention) -> Whitening | None:
    """The convention's rule, None where it does not whiten."""
    if not convention.whiten_advantages:
        return None
    return Whitening(**asdict(convention.whitening))


def _limits(convention: PpoConvention | GrpoConvention) -> KlLimits:
    return KlLimits(**asdict(convention.kl_limits))


def _penalty(case: Case, convention: PpoConvention | GrpoConvention) -> KlPenalty | None:
    """The KL in the reward, None where it is off or in the loss."""
    if convention.kl_coef <= 0 or convention.kl_placement == "loss":
        return None
    return KlPenalty(
        coef=convention.kl_coef,
        estimator=convention.kl_estimator,
        old_logprobs_BT=case.column("old_logprobs"),
        ref_logprobs_BT=case.column("ref_logprobs"),
        limits=_limits(convention),
    )


def _figures(case: Case, convention: PpoConvention | GrpoConvention, credit: Credit) -> dict[str, Any]:
    """What both methods print. kl: per token, of the logprobs that the convention takes it of."""
    logprobs, in_loss = case.column("logprobs"), convention.kl_placement == "loss"
    loss = policy_loss_clip(
        logprobs,
        old_logprobs=case.column("old_logprobs"),
        advantages=credit.advantages_BT,
        clip_low=convention.clip_low,
        clip_high=convention.clip_high,
        dual_clip=convention.dual_clip,
        log_ratio_limit=convention.log_ratio_limit,
    ).loss
    kl_BT = None
    if "ref_logprobs" in case.tokens or (in_loss and convention.kl_coef > 0):
        kl_BT = kl_estimate(
            logprobs if in_loss else case.column("old_logprobs"),
            ref_logprobs=case.column("ref_logprobs"),
            estimator=convention.kl_estimator,
            limits=_limits(convention),
        )
        kl_BT = torch.where(case.mask_BT, kl_BT, torch.zeros_like(kl_BT))
        if in_loss:
            loss = loss + convention.kl_coef * kl_BT
    policy_loss = _aggregate(loss, mask_BT=case.mask_BT, convention=convention)
    return {
        "token_rewards": credit.token_rewards_BT.tolist(),
        "advantages": credit.advantages_BT.tolist(),
        "policy_loss": policy_loss.item(),
        "kl": None if kl_BT is None else kl_BT.tolist(),
    }


def _aggregate(loss_BT: Tensor, *, mask_BT: Tensor, convention: PpoConvention | GrpoConvention) -> Tensor:
    """One number of the token losses. The constant of `constant` is the width of the case, as verl's default."""
    weights_B = token_weights(
        mask_BT.sum(dim=1),
        aggregation=convention.aggregation,
        dtype=torch.float64,
        horizon_tokens=mask_BT.shape[1],
    )
    return (weights_B[:, None] * torch.where(mask_BT, loss_BT, torch.zeros_like(loss_BT))).sum()


def main(arguments: list[str] | None = None) -> int:
    """Read the case, print the figures; 0, or 2 for a case that cannot be evaluated."""
    parser = argparse.ArgumentParser(prog="python -m stages.rl.reference", description=__doc__)
    parser.add_argument("--convention", required=True, choices=get_args(ConventionName))
    parser.add_argument("--method", default="ppo", choices=("ppo", "grpo"))
    parser.add_argument("--input", required=True, type=Path, metavar="CASE.JSON")
    options = parser.parse_args(arguments)
    try:
        case = read_case(_document(options.input))
        if options.method == "ppo":
            figures = evaluate_ppo(case, PPO[options.convention])
        else:
            figures = evaluate_grpo(case, GRPO[options.convention])
        _refuse_overflow(figures)
    except CaseError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(figures, allow_nan=False))
    return 0


def _refuse_overflow(figures: dict[str, Any]) -> None:
    for name, figure in figures.items():
        numbers = torch.tensor([] if figure is None else figure, dtype=torch.float64)
        if not numbers.isfinite().all():
            raise CaseError(f"{name}: expected finite figures, found an overflow; the case's numbers are too large")


def _document(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CaseError(f"--input: expected a readable file, found {error.strerror}: {path}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CaseError(f"{path}: expected JSON, found {error}") from None


if __name__ == "__main__":
    sys.exit(main())
