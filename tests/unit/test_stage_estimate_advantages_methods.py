"""estimate_advantages with every method of the configuration: what it writes, against the oracles."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.algorithms import (
    Algorithm,
    Cispo,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Overlong,
    Ppo,
    ReinforcePp,
    ReinforcePpBaseline,
    Rloo,
)
from configs.conventions import KlLimits
from stages.artifacts.errors import GateError
from stages.estimate_advantages.run import run
from tests.unit import rl_oracles, rl_peers
from tests.unit.stage_artifacts import Row, rollout, run_stage
from tests.unit.test_stage_estimate_advantages import a_round, advantages_of, job, logprobs, reward

WIDTH = 6
GROUPS = [0, 0, 1, 1, 2, 2]


def credit(store: Path, algorithm: Algorithm, part: str = "advantages") -> list[list[float]]:
    """Three groups of two, in canonical order: the column `part` of what the stage writes."""
    directory, _ = run_stage(run, job(store, algorithm, *a_round()))
    found = advantages_of(directory)
    return [found[key][part] for key in sorted(found)]


def rewards() -> list[float]:
    return [row["reward"] for row in a_round()[1]]


def spread(per_rollout: list[float]) -> list[list[float]]:
    return [[x] * len(row["completion_ids"]) for x, row in zip(per_rollout, a_round()[0], strict=True)]


def agree(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


def case(**hyperparameters: float) -> rl_peers.Case:
    """The round as a case for the oracles of other projects."""
    rows, rewarded, lps = a_round()

    def padded(name: str) -> list[list[float]]:
        return [lp[name] + [0.0] * (WIDTH - len(lp[name])) for lp in lps]

    return {
        "completion_mask": [[int(t < len(row["completion_ids"])) for t in range(WIDTH)] for row in rows],
        "rewards": [row["reward"] for row in rewarded],
        "logprobs": padded("old_logprobs"),
        "new_values": padded("values"),
        "group_size": 2,
        **{name: padded(name) for name in ("old_logprobs", "ref_logprobs", "values")},
        **hyperparameters,
    }


@pytest.mark.parametrize("algorithm", [Dapo(overlong=None), Gspo(), Cispo(), Grpo(scale_by_std=True)])
def test_the_group_methods_divide_by_the_deviation(tmp_path: Path, algorithm: Algorithm) -> None:
    expected = rl_oracles.group_advantages(rewards(), GROUPS, scale_by_std=True)
    agree(credit(tmp_path, algorithm), spread(expected))


def test_dr_grpo_does_not(tmp_path: Path) -> None:
    agree(credit(tmp_path, DrGrpo()), spread(rl_oracles.group_advantages(rewards(), GROUPS, scale_by_std=False)))


def test_rloo_leaves_one_out_of_the_shaped_rewards(tmp_path: Path) -> None:
    agree(credit(tmp_path, Rloo(kl_coef=0.0)), spread(rl_oracles.leave_one_out(rewards(), GROUPS)))
    shaped = [
        value - 0.3 * sum(o - r for o, r in zip(lp["old_logprobs"], lp["ref_logprobs"], strict=True))
        for value, lp in zip(rewards(), a_round()[2], strict=True)
    ]
    agree(credit(tmp_path, Rloo(kl_coef=0.3)), spread(rl_oracles.leave_one_out(shaped, GROUPS)))


def test_reinforce_pp_whitens_returns_over_the_round(tmp_path: Path) -> None:
    returns = [
        rl_oracles.returns_to_go(
            rl_oracles.token_rewards(value, lp["old_logprobs"], lp["ref_logprobs"], kl_coef=0.3, estimator="k1"),
            discount=0.9,
        )
        for value, lp in zip(rewards(), a_round()[2], strict=True)
    ]
    white = iter(rl_oracles.whiten([x for row in returns for x in row]))
    expected = [[next(white) for _ in row] for row in returns]
    agree(credit(tmp_path, ReinforcePp(kl_coef=0.3, discount=0.9)), expected)


def test_reinforce_pp_baseline_whitens_what_the_group_leaves(tmp_path: Path) -> None:
    rows = spread(rl_oracles.group_advantages(rewards(), GROUPS, scale_by_std=False))
    white = iter(rl_oracles.whiten([x for row in rows for x in row]))
    agree(credit(tmp_path, ReinforcePpBaseline()), [[next(white) for _ in row] for row in rows])


@pytest.mark.parametrize("name", ["openrlhf", "verl"])
def test_a_round_under_anothers_convention_is_that_projects(tmp_path: Path, name: str) -> None:
    """TRL's values reach one further: test_stage_estimate_advantages_conventions.py has it, and the other three."""
    ppo = {"openrlhf": rl_peers.openrlhf_ppo, "verl": rl_peers.verl_ppo}[name](case())
    grpo = {"openrlhf": rl_peers.openrlhf_grpo, "verl": rl_peers.verl_grpo}
    lengths = [len(row["completion_ids"]) for row in a_round()[0]]

    def cut(rows: list[list[float]]) -> list[list[float]]:
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]

    for part in ("token_rewards", "advantages", "returns"):
        agree(credit(tmp_path, Ppo(convention=name), part), cut(ppo[part]))  # type: ignore[arg-type]
    signal = case()
    found = credit(tmp_path, Grpo(convention=name))  # type: ignore[arg-type]
    agree(found, cut(grpo[name](signal)["advantages"]))


def test_overlong_and_truncated_completions_are_punished(tmp_path: Path) -> None:
    rows = [rollout("a", 0, tokens=10), rollout("a", 1, tokens=9), rollout("a", 2, tokens=4)]
    rows[0]["finish_reason"] = "length"
    rewarded = [reward(row, 1.0) for row in rows]
    lps = [logprobs(row, old=[-1.0] * len(row["completion_ids"])) for row in rows]

    def found(algorithm: Algorithm) -> list[float]:
        written = advantages_of(run_stage(run, job(tmp_path, algorithm, rows, rewarded, lps))[0])
        return [written["a", sample]["token_rewards"][-1] for sample in range(3)]

    # buffer: two of ten tokens; 9 tokens lose half of the factor, 10 all of it
    shaped = Grpo(overlong=Overlong(factor=0.5), max_completion_tokens=10)
    assert found(shaped) == pytest.approx([0.5, 0.75, 1.0])
    assert found(Grpo(truncated_penalty=0.25)) == pytest.approx([0.75, 1.0, 1.0])
    with pytest.raises(GateError, match="max_completion_tokens: expected a number, because overlong is set"):
        found(Dapo())


def test_the_reward_is_clipped_after_the_groups_baseline_and_before_the_critics(tmp_path: Path) -> None:
    rows: list[Row] = [rollout("a", s, tokens=1) for s in range(2)]
    rewarded = [reward(rows[0], 9.0), reward(rows[1], 1.0)]
    lps = [logprobs(row, old=[-1.0], values=[0.0]) for row in rows]

    def found(algorithm: Algorithm) -> list[float]:
        written = advantages_of(run_stage(run, job(tmp_path, algorithm, rows, rewarded, lps))[0])
        return [written["a", sample]["advantages"][0] for sample in range(2)]

    assert found(Grpo(reward_clip=3.0)) == [3.0, -3.0]  # 4 and -4
    assert found(Rloo(kl_coef=0.0, reward_clip=3.0)) == [3.0, -3.0]  # 8 and -8
    assert found(Ppo(kl_coef=0.0, reward_clip=3.0, whiten_advantages=False)) == [3.0, 1.0]


def test_the_kl_in_the_reward_is_cut_where_the_configuration_says(tmp_path: Path) -> None:
    row = rollout("a", 0, tokens=2)
    lps = [logprobs(row, old=[-1.0, -1.0], ref=[-21.0, 19.0], values=[0.0, 0.0])]

    def found(algorithm: Algorithm) -> list[float]:
        written = advantages_of(run_stage(run, job(tmp_path, algorithm, [row], [reward(row, 0.0)], lps))[0])
        return list(written["a", 0]["token_rewards"])

    assert found(Ppo(kl_coef=0.5)) == [-10.0, 10.0]  # k1 20 and -20
    assert found(Ppo(kl_coef=0.5, kl_limits=KlLimits(k1=10.0))) == [-5.0, 5.0]
