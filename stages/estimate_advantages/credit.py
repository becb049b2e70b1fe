"""Which equations of stages/rl a method of the configuration means: one `match`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from configs.algorithms import (
    Algorithm,
    Cispo,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Ppo,
    ReinforcePp,
    ReinforcePpBaseline,
    Rloo,
)
from stages.artifacts.errors import GateError
from stages.rl.advantages import (
    leave_one_out_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    spread,
)
from stages.rl.credit import Credit, KlPenalty, group_credit, ppo_credit, shape
from stages.rl.kl import KlLimits
from stages.rl.rewards import clip_rewards, overlong_penalty, penalise_truncated
from stages.rl.whitening import Whitening


@dataclass(frozen=True)
class RoundBatch:
    """One round in canonical order, right-padded. ref_logprobs_BT, values_BT: None where they were not computed.

    group_B: numbered from 0, in canonical order. values_BT: at the first padding, the value after the end, where the
    reward lies there.
    """

    keys: list[tuple[str, int]]
    lengths: list[int]
    group_B: Tensor
    rewards_B: Tensor
    truncated_B: Tensor
    mask_BT: Tensor
    old_logprobs_BT: Tensor
    ref_logprobs_BT: Tensor | None
    values_BT: Tensor | None


def estimate(batch: RoundBatch, *, algorithm: Algorithm, kl_coef: float, ranks: int = 1) -> Credit:
    """Credit by the method of `algorithm`. ranks: into whose shares PPO's whitening may divide the round.

    Raises GateError where what it needs was not computed.
    """
    mask_BT, group_B = batch.mask_BT, batch.group_B
    kl = _penalty(batch, algorithm=algorithm, kl_coef=kl_coef)
    rewards_B = _rewards(batch, algorithm)
    match algorithm:
        case Ppo():
            return _ppo(batch, rewards_B, kl, algorithm=algorithm, ranks=ranks)
        case Grpo() | DrGrpo() | Dapo() | Gspo() | Cispo():
            return group_credit(
                rewards_B,
                group_B=group_B,
                mask_BT=mask_BT,
                kl=kl,
                scale_by_std=algorithm.scale_by_std,
                std_eps=algorithm.std_eps,
                singleton=algorithm.singleton if isinstance(algorithm, Grpo) else "zero",
                reward_clip=algorithm.reward_clip,
                cumulate_kl=isinstance(algorithm, Grpo) and algorithm.cumulate_kl,
            )
        case Rloo():
            rewards_BT = shape(rewards_B, mask_BT=mask_BT, kl=kl)
            advantages_B = leave_one_out_advantages(rewards_BT.sum(dim=1), group_B=group_B)
            return Credit(rewards_BT, spread(clip_rewards(advantages_B, limit=algorithm.reward_clip), mask_BT=mask_BT))
        case ReinforcePp():
            rewards_BT = shape(clip_rewards(rewards_B, limit=algorithm.reward_clip), mask_BT=mask_BT, kl=kl)
            whitening = Whitening(**asdict(algorithm.whitening))
            advantages_BT = reinforce_pp_advantages(
                rewards_BT, mask_BT=mask_BT, discount=algorithm.discount, whitening=whitening
            )
            return Credit(rewards_BT, advantages_BT)
        case ReinforcePpBaseline():
            clipped_B = clip_rewards(rewards_B, limit=algorithm.reward_clip)
            advantages_BT = reinforce_pp_baseline_advantages(
                clipped_B, group_B=group_B, mask_BT=mask_BT, whitening=Whitening(**asdict(algorithm.whitening))
            )
            return Credit(shape(clipped_B, mask_BT=mask_BT, kl=None), advantages_BT)


def shares(batch: RoundBatch, *, ranks: int) -> list[Tensor]:
    """The rollouts of each of `ranks` ranks, as indices: every ranks-th prompt, in canonical order; none is empty.

    A project that whitens by rank has each rank sample prompts of its own. Here the ranks train on one round together,
    so which prompts are whose is a choice; this one depends on the round alone.
    """
    return [rows for rank in range(ranks) if len(rows := (batch.group_B % ranks == rank).nonzero().flatten())]


def num_rewarded(batch: RoundBatch, *, algorithm: Algorithm, ranks: int) -> list[int]:
    """How many positions of each rollout have token rewards and returns.

    Its tokens; with first_pad one more, unless the rollout is as long as the longest of its share.
    """
    found = list(batch.lengths)
    if isinstance(algorithm, Ppo) and algorithm.reward_placement == "first_pad":
        for rows in shares(batch, ranks=ranks):
            width = max(batch.lengths[b] for b in rows.tolist())
            for b in rows.tolist():
                found[b] = min(batch.lengths[b] + 1, width)
    return found


def _ppo(batch: RoundBatch, rewards_B: Tensor, kl: KlPenalty | None, *, algorithm: Ppo, ranks: int) -> Credit:
    """PPO of each share by itself, as wide as its longest completion."""
    if batch.values_BT is None:
        raise GateError("values: expected them, because ppo has a critic; found empty lists")
    whole = [torch.zeros_like(batch.values_BT) for _ in range(3)]
    for rows in shares(batch, ranks=ranks):
        width = max(batch.lengths[b] for b in rows.tolist())
        credit = ppo_credit(
            rewards_B[rows],
            mask_BT=batch.mask_BT[rows, :width],
            values_BT=batch.values_BT[rows, :width],
            kl=None
            if kl is None
            else replace(
                kl,
                old_logprobs_BT=kl.old_logprobs_BT[rows, :width],
                ref_logprobs_BT=kl.ref_logprobs_BT[rows, :width],
            ),
            discount=algorithm.discount,
            gae_lambda=algorithm.gae_lambda,
            whitening=Whitening(**asdict(algorithm.whitening)) if algorithm.whiten_advantages else None,
            reward_clip=algorithm.reward_clip,
            reward_placement=algorithm.reward_placement,
        )
        assert credit.returns_BT is not None, "ppo has value targets"
        for x_BT, part_BT in zip(
            whole, (credit.token_rewards_BT, credit.advantages_BT, credit.returns_BT), strict=True
        ):
            x_BT[rows, :width] = part_BT
    return Credit(*whole)


def _rewards(batch: RoundBatch, algorithm: Algorithm) -> Tensor:
    """The round's rewards, less what cut and overlong completions are punished with."""
    rewards_B = penalise_truncated(batch.rewards_B, truncated_B=batch.truncated_B, penalty=algorithm.truncated_penalty)
    if algorithm.overlong is None:
        return rewards_B
    longest = algorithm.max_completion_tokens
    if longest is None:
        raise GateError("algorithm.max_completion_tokens: expected a number, because overlong is set; found none")
    return rewards_B + overlong_penalty(
        torch.tensor(batch.lengths),
        max_completion_tokens=longest,
        buffer_tokens=max(1, round(algorithm.overlong.buffer_share * longest)),
        factor=algorithm.overlong.factor,
    )


def _penalty(batch: RoundBatch, *, algorithm: Algorithm, kl_coef: float) -> KlPenalty | None:
    """The KL in the reward, where it is placed there."""
    if algorithm.kl_placement == "loss" or kl_coef <= 0:
        return None
    if batch.ref_logprobs_BT is None:
        raise GateError("ref_logprobs: expected them, because the KL is placed in the reward; found empty lists")
    return KlPenalty(
        coef=kl_coef,
        estimator=algorithm.kl_estimator,
        old_logprobs_BT=batch.old_logprobs_BT,
        ref_logprobs_BT=batch.ref_logprobs_BT,
        limits=KlLimits(**asdict(algorithm.kl_limits)),
    )
