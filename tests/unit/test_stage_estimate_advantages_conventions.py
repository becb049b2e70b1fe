"""A run's estimate_advantages under every convention is what the reference program prints for the same round."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any, get_args

import pytest

from configs.algorithms import Algorithm, Grpo, Ppo
from configs.conventions import GRPO, PPO, ConventionName, RewardPlacement
from stages.artifacts.errors import GateError
from stages.estimate_advantages.job import EstimateAdvantages, Parameters
from stages.estimate_advantages.run import run
from stages.rl.case import read_case
from stages.rl.reference import evaluate_grpo, evaluate_ppo
from tests.unit.stage_artifacts import Row, rollout, run_stage
from tests.unit.test_stage_estimate_advantages import advantages_of, job, logprobs, reward

LENGTHS = [1, 6, 3, 5, 2, 4, 6, 1]  # one token; and as long as the longest, as cut ones are
REWARDS = [1.5, -2.0, 13.0, 0.25, 0.5, 0.5, 0.5, 0.5]  # one beyond OpenRLHF's clip; a group of equal ones
GROUP = 4
CONVENTIONS: tuple[ConventionName, ...] = get_args(ConventionName)


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def a_round() -> list[dict[str, Any]]:
    """Per rollout, in canonical order: its length, reward and columns, values with that after the end."""
    rng = random.Random(7)

    def numbers(low: float, high: float, count: int) -> list[float]:
        return [float32(rng.uniform(low, high)) for _ in range(count)]

    rows = []
    for length, value in zip(LENGTHS, REWARDS, strict=True):
        old = numbers(-4, 0, length)
        ref = [float32(x + rng.uniform(-0.5, 0.5)) for x in old]
        columns = {"old_logprobs": old, "ref_logprobs": ref, "values": numbers(-1, 1, length + 1)}
        rows.append({"length": length, "reward": value, **columns})
    rows[1]["ref_logprobs"][2] += 14.0  # beyond OpenRLHF's cut of k1
    return rows


def by_stage(
    store: Path, algorithm: Algorithm, *, group_size: int, placement: RewardPlacement = "last_token", ranks: int = 1
) -> list[Row]:
    """What the stage writes, in canonical order."""
    after_end = 1 if placement == "first_pad" else 0
    rows, rewards, lps = [], [], []
    for index, given in enumerate(a_round()):
        row = rollout(f"p{index // group_size}", index % group_size, tokens=given["length"])
        values = given["values"][: given["length"] + after_end] if isinstance(algorithm, Ppo) else []
        rows.append(row)
        rewards.append(reward(row, given["reward"]))
        lps.append(logprobs(row, old=given["old_logprobs"], ref=given["ref_logprobs"], values=values))
    made = job(store, algorithm, rows, rewards, lps)
    made = EstimateAdvantages(**dict(made) | {"parameters": Parameters(algorithm=algorithm, ranks=ranks)})
    found = advantages_of(run_stage(run, made)[0])
    return [found[row["prompt_id"], row["sample_index"]] for row in rows]


def case(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The same rollouts for the reference program: as wide as the longest of them."""
    width = max(row["length"] for row in rows)

    def padded(name: str) -> list[list[float]]:
        return [(row[name] + [0.0] * width)[:width] for row in rows]

    return {
        "completion_mask": [[int(t < row["length"]) for t in range(width)] for row in rows],
        "rewards": [row["reward"] for row in rows],
        "logprobs": padded("old_logprobs"),
        "new_values": padded("values"),
        "group_size": GROUP,
        **{name: padded(name) for name in ("old_logprobs", "ref_logprobs", "values")},
    }


def agree(stage: list[Row], printed: dict[str, Any], rows: list[dict[str, Any]], parts: tuple[str, ...]) -> None:
    """To 1e-6; the stage holds float32 and a number per position that counts, the program pads with zeros."""
    assert len(stage) == len(rows)
    for part in parts:
        for written, expected in zip(stage, printed[part], strict=True):
            count = len(written[part])
            assert written[part] == pytest.approx(expected[:count], rel=1e-6, abs=1e-6), part
            assert not any(expected[count:]), f"{part} counts further than the stage wrote"


@pytest.mark.parametrize("name", CONVENTIONS)
def test_ppo_of_a_run_is_the_reference_programs(tmp_path: Path, name: ConventionName) -> None:
    algorithm = Ppo(convention=name)
    placement = PPO[name].reward_placement
    assert (algorithm.reward_placement, algorithm.whitening_scope) == (placement, PPO[name].whitening_scope)
    stage = by_stage(tmp_path, algorithm, group_size=1, placement=placement)
    rows = a_round()
    agree(stage, evaluate_ppo(read_case(case(rows)), PPO[name]), rows, ("token_rewards", "advantages", "returns"))
    after_end = [len(row["returns"]) - length for row, length in zip(stage, LENGTHS, strict=True)]
    assert after_end == [int(name == "trl" and length < 6) for length in LENGTHS]
    assert [len(row["advantages"]) for row in stage] == LENGTHS


@pytest.mark.parametrize("name", CONVENTIONS)
def test_grpo_of_a_run_is_the_reference_programs(tmp_path: Path, name: ConventionName) -> None:
    stage = by_stage(tmp_path, Grpo(convention=name), group_size=GROUP)
    rows = a_round()
    agree(stage, evaluate_grpo(read_case(case(rows)), GRPO[name]), rows, ("token_rewards", "advantages"))


@pytest.mark.parametrize("name", CONVENTIONS)
def test_on_two_ranks_trl_whitens_and_pads_each_share_by_itself(tmp_path: Path, name: ConventionName) -> None:
    """The reference program on each share alone. Every second prompt: lengths 1, 3, 2, 6 and 6, 5, 4, 1."""
    placement = PPO[name].reward_placement
    ranks = 2 if PPO[name].whitening_scope == "rank" else 1
    stage = by_stage(tmp_path, Ppo(convention=name), group_size=1, placement=placement, ranks=ranks)
    parts = ("token_rewards", "advantages", "returns")
    for rank in range(ranks):
        mine = a_round()[rank::ranks]
        agree(stage[rank::ranks], evaluate_ppo(read_case(case(mine)), PPO[name]), mine, parts)
    whole = by_stage(tmp_path, Ppo(convention=name), group_size=1, placement=placement)
    assert (stage == whole) == (name != "trl")


def test_more_ranks_than_prompts_and_shares_of_another_width(tmp_path: Path) -> None:
    """Two prompts on three ranks: groups stay whole, and the third share is nothing."""
    stage = by_stage(tmp_path, Ppo(convention="trl"), group_size=GROUP, placement="first_pad", ranks=3)
    for at in (0, GROUP):
        mine = a_round()[at : at + GROUP]
        printed = evaluate_ppo(read_case(case(mine)), PPO["trl"])
        agree(stage[at : at + GROUP], printed, mine, ("token_rewards", "advantages", "returns"))


def test_values_of_another_placement_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="expected 2 values, one per token and one after the last, found 1"):
        by_stage(tmp_path, Ppo(convention="trl"), group_size=1)
    with pytest.raises(GateError, match="expected 1 values, one per token, found 2"):
        by_stage(tmp_path, Ppo(), group_size=1, placement="first_pad")
