"""`stages.rl.reference`: each convention agrees with its project's formulas, and bad cases end in one line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.conventions import GRPO, PPO
from stages.rl.case import CaseError, read_case
from stages.rl.reference import evaluate_grpo, evaluate_ppo, main
from tests.unit import rl_peers

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [1, 6, 3, 5, 2, 4, 6, 1]  # one-token completions; rows that fill the width, as truncated ones do


def a_case(*, seed: int = 1, width: int = 6, **hyperparameters: Any) -> dict[str, Any]:
    """Eight sequences in two groups of four; the second group's rewards are equal."""
    rng = random.Random(seed)

    def rows(low: float, high: float) -> list[list[float]]:
        return [[rng.uniform(low, high) for _ in range(width)] for _ in LENGTHS]

    old = rows(-4, 0)
    case = {
        "completion_mask": [[int(t < n) for t in range(width)] for n in LENGTHS],
        "old_logprobs": old,
        "logprobs": [[x + rng.uniform(-0.6, 0.6) for x in row] for row in old],
        "ref_logprobs": [[x + rng.uniform(-0.5, 0.5) for x in row] for row in old],
        "values": rows(-1, 1),
        "new_values": rows(-2, 2),
        "rewards": [1.5, -2.0, 13.0, 0.25, 0.3, 0.3, 0.3, 0.3],
        "group_size": 4,
        "hyperparameters": hyperparameters,
    }
    case["ref_logprobs"][1][2] += 14.0  # beyond OpenRLHF's cut of k1, verl's of k3
    case["ref_logprobs"][2][0] -= 12.0
    case["logprobs"][3][1] = case["old_logprobs"][3][1] + 1.9  # ratio 6.7, beyond the dual clip
    case["logprobs"][1][3] = case["old_logprobs"][1][3] + 1.7
    return case


def agree(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            agree(x, y)
    else:
        assert found == (None if expected is None else pytest.approx(expected, abs=1e-9, rel=1e-9))


PEERS = {"openrlhf": rl_peers.openrlhf_ppo, "verl": rl_peers.verl_ppo, "trl": rl_peers.trl_ppo}
GROUP_PEERS = {"openrlhf": rl_peers.openrlhf_grpo, "verl": rl_peers.verl_grpo, "trl": rl_peers.trl_grpo}


@pytest.mark.parametrize("width", [6, 9])  # without a first pad for the longest, and with one
@pytest.mark.parametrize("name", PEERS)
def test_ppo_agrees_with_the_projects_formulas(name: str, width: int) -> None:
    for seed in range(3):
        found = evaluate_ppo(read_case(a_case(seed=seed, width=width)), PPO[name])
        expected = PEERS[name](a_case(seed=seed, width=width))
        assert found.keys() == expected.keys()
        for key, figure in expected.items():
            agree(found[key], figure)
        given = {"kl_coef": 0.3, "discount": 0.9, "gae_lambda": 0.8}
        found = evaluate_ppo(read_case(a_case(seed=seed, width=width, **given)), PPO[name])
        expected = PEERS[name](a_case(seed=seed, width=width), kl_coef=0.3, gamma=0.9, lam=0.8)
        for key, figure in expected.items():
            agree(found[key], figure)


@pytest.mark.parametrize("width", [6, 9])
@pytest.mark.parametrize("name", GROUP_PEERS)
def test_grpo_agrees_with_the_projects_formulas(name: str, width: int) -> None:
    for seed in range(3):
        for given in ({}, {"kl_coef": 0.3}):
            found = evaluate_grpo(read_case(a_case(seed=seed, width=width, **given)), GRPO[name])
            expected = GROUP_PEERS[name](a_case(seed=seed, width=width), **given)
            assert found.keys() == expected.keys()
            for key, figure in expected.items():
                agree(found[key], figure)


def test_the_conventions_differ_on_one_case() -> None:
    """If they did not, the tests above would prove little."""
    losses = {name: evaluate_ppo(read_case(a_case()), PPO[name])["policy_loss"] for name in PPO}
    assert len({round(loss, 4) for loss in losses.values()}) == 4, losses
    grouped = {name: evaluate_grpo(read_case(a_case()), GRPO[name])["policy_loss"] for name in GRPO}
    assert len({round(loss, 4) for loss in grouped.values()}) == 4, grouped


def test_ratchets_own_ppo_by_hand() -> None:
    case = {
        "completion_mask": [[1, 1, 0], [1, 0, 0]],
        "logprobs": [[-1.0, -1.0, 0.0], [-1.0, 0.0, 0.0]],
        "old_logprobs": [[-1.0, -1.0, 0.0], [-1.0, 0.0, 0.0]],
        "ref_logprobs": [[-1.5, -1.0, 0.0], [-0.5, 0.0, 0.0]],
        "values": [[0.2, 0.4, 9.0], [0.5, 9.0, 9.0]],
        "new_values": [[0.2, 0.9, 9.0], [0.5, 9.0, 9.0]],
        "rewards": [1.0, 0.0],
        "hyperparameters": {"kl_coef": 0.1, "gae_lambda": 0.5, "whiten_advantages": False},
    }
    found = evaluate_ppo(read_case(case), PPO["ratchet"])
    # k1: 0.5, 0 and -0.5. Rewards: -0.05, 1 and 0.05.
    agree(found["kl"], [[0.5, 0.0, 0.0], [-0.5, 0.0, 0.0]])
    agree(found["token_rewards"], [[-0.05, 1.0, 0.0], [0.05, 0.0, 0.0]])
    # A_1 = 1 - 0.4 = 0.6; A_0 = -0.05 + 0.4 - 0.2 + 0.5 * 0.6 = 0.45; second: 0.05 - 0.5 = -0.45
    agree(found["advantages"], [[0.45, 0.6, 0.0], [-0.45, 0.0, 0.0]])
    agree(found["returns"], [[0.65, 1.0, 0.0], [0.05, 0.0, 0.0]])
    # ratio 1: -(0.45 + 0.6 - 0.45) / 3
    agree(found["policy_loss"], -0.2)
    # 0.5 * (0.45^2 + max(0.1^2, (0.6 - 1)^2) + 0.45^2) / 3: the new value 0.9 is cut to 0.4 + 0.2
    agree(found["value_loss"], 0.5 * (0.2025 + 0.16 + 0.2025) / 3)


def test_a_verl_group_of_one_keeps_its_reward() -> None:
    case = a_case() | {"group_size": 1}
    found = evaluate_grpo(read_case(case), GRPO["verl"])
    agree(found["advantages"][0][0], 1.5 / (1 + 1e-6))
    assert not any(map(any, evaluate_grpo(read_case(case), GRPO["trl"])["advantages"]))


def test_whatever_is_in_the_padding_changes_nothing() -> None:
    case, dirty = a_case(), a_case()
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "values", "new_values"):
        for row, n in zip(dirty[name], LENGTHS, strict=True):
            row[n + 1 :] = [1e6] * len(row[n + 1 :])  # the first pad counts, in TRL's values
    for name in PPO:
        assert evaluate_ppo(read_case(case), PPO[name]) == evaluate_ppo(read_case(dirty), PPO[name])
        assert evaluate_grpo(read_case(case), GRPO[name]) == evaluate_grpo(read_case(dirty), GRPO[name])


def test_the_order_of_sequences_changes_nothing_else() -> None:
    case = a_case()
    order = [3, 0, 2, 1, 6, 7, 5, 4]  # inside the groups
    mixed = {key: [value[i] for i in order] if isinstance(value, list) else value for key, value in case.items()}
    for evaluate, conventions in ((evaluate_ppo, PPO), (evaluate_grpo, GRPO)):
        for convention in conventions.values():
            straight, shuffled = (evaluate(read_case(c), convention) for c in (case, mixed))  # type: ignore[operator]
            agree(shuffled["policy_loss"], straight["policy_loss"])
            agree(shuffled["advantages"], [straight["advantages"][i] for i in order])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rewards": [1.0]}, "rewards: expected 8 numbers, one per sequence, found 1 of them"),
        ({"values": [[1.0]]}, "values: expected 8 rows of 6 as completion_mask, found 1 rows of 1"),
        ({"completion_mask": []}, "completion_mask: expected a list of numbers per sequence, found list []"),
        ({"completion_mask": [[0, 0]]}, "completion_mask[0]: expected zeros and ones with at least one 1, found"),
        ({"logprobs": [[1.0, 2.0], [1.0]]}, "logprobs[1]: expected 2 numbers, padded on the right, found 1"),
        ({"old_logprobs": [[None]]}, "old_logprobs[0][0]: expected a finite number, found None"),
        ({"hyper_parameters": {}}, "hyper_parameters: expected hyperparameters, found a key that is almost that"),
        ({"hyperparameters": {"lamda": 1}}, "hyperparameters.lamda: expected one of clip, kl_coef"),
        ({"hyperparameters": {"clip": "0.2"}}, "hyperparameters.clip: expected a finite number, found '0.2'"),
        ({"hyperparameters": {"kl_estimator": "k4"}}, "hyperparameters.kl_estimator: expected one of k1, k2, k3"),
        ({"hyperparameters": []}, "hyperparameters: expected an object, found list []"),
        ({"group_size": 3}, "group_size: expected a divisor of the 8 sequences, found 3"),
        ({"group_size": "4"}, "group_size: expected a whole number, found '4'"),
        ({"logprobs": [[1e308] * 6] * 8, "old_logprobs": [[-1e308] * 6] * 8}, "advantages: expected finite figures"),
    ],
)
def test_a_bad_case_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], line: str
) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(a_case() | change))
    method = "ppo" if "old_logprobs" in change and "logprobs" in change else "grpo"
    convention = "trl" if method == "ppo" else "openrlhf"
    assert main(["--convention", convention, "--method", method, "--input", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and err.count("\n") == 1


def test_what_a_method_does_not_have_changes_nothing() -> None:
    """One case serves both methods, and may have a name."""
    given = {"kl_coef": 0.3, "discount": 0.9, "gae_lambda": 0.8, "value_clip": 0.1, "std_eps": 0.5}
    shared, bare = a_case(**given) | {"name": "ragged"}, a_case(kl_coef=0.3, std_eps=0.5)
    assert evaluate_grpo(read_case(shared), GRPO["trl"]) == evaluate_grpo(read_case(bare), GRPO["trl"])
    del given["std_eps"]
    assert evaluate_ppo(read_case(shared), PPO["trl"]) == evaluate_ppo(read_case(a_case(**given)), PPO["trl"])


def test_what_is_missing_is_named() -> None:
    case = a_case()
    del case["ref_logprobs"]
    with pytest.raises(CaseError, match="ref_logprobs: expected a list of numbers per sequence, found nothing"):
        evaluate_ppo(read_case(case), PPO["openrlhf"])
    assert evaluate_ppo(read_case(case), PPO["verl"])["kl"] is None  # its KL is off
    with pytest.raises(CaseError, match=r"input: expected an object with completion_mask, rewards, .* found int 3"):
        read_case(3)


def test_the_program_prints_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(a_case(clip=0.1, value_clip=None)))
    command = [sys.executable, "-m", "stages.rl.reference", "--convention", "trl", "--input", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    printed = json.loads(result.stdout)
    assert printed == evaluate_ppo(read_case(a_case(clip=0.1, value_clip=None)), PPO["trl"])
    for text, line in (("{", "expected JSON, found"), (None, "--input: expected a readable file, found")):
        broken = tmp_path / "broken.json"
        if text:
            broken.write_text(text)
        else:
            broken.unlink()
        assert main(["--convention", "verl", "--input", str(broken)]) == 2
        assert line in capsys.readouterr().err
