"""The arithmetic of the benches: what they count, and that both sides are told the same thing. No engine is started."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.overhead import covered
from bench.peer_case import CASES, SideRun, peer_settings
from bench.peer_environment import VERSION, find
from bench.tales import first_synonyms, tale, write_tales
from bench.watched import Memory, Watched, memory_of, run_watched, sample, tree
from configs.load import load_config

ROOT = Path(__file__).resolve().parents[2]


def side(*, prompts: list[list[str]], ends: list[float]) -> SideRun:
    """A run of two rollouts a round."""
    return SideRun(
        rollouts_per_round=2,
        wall_seconds=ends[-1],
        peak_pss_bytes=1,
        peak_rss_bytes=1,
        round_ends=ends,
        reward_means=[0.0 for _ in ends],
        lengths=[[1, 3] for _ in ends],
        prompts=prompts,
        accuracy=[(0, 1.0, 0.5), (2, 7.0, 0.91), (4, 9.0, 0.95)],
        logs=[],
    )


def test_seconds_with_any_program_count_once_however_programs_overlap() -> None:
    programs = [(0.0, 1.0), (2.0, 4.0), (3.0, 3.5), (3.5, 5.0), (9.0, 12.0), (20.0, 21.0)]
    assert covered(programs, 0.5, 10.0) == pytest.approx(0.5 + 3.0 + 1.0)
    assert covered(programs, 5.0, 9.0) == 0.0
    assert covered([], 0.0, 1.0) == 0.0


def test_rollouts_per_second_leave_the_first_round_out() -> None:
    run = side(prompts=[["a"], ["b"], ["c"]], ends=[30.0, 31.0, 33.0])
    assert run.rollouts_per_second == pytest.approx(2 / 1.5)
    assert run.first_round_seconds == 30.0
    assert run.seconds_to(0.9) == 7.0
    assert run.seconds_to(0.99) is None
    assert run.accuracy_above(run) == [(0, 0.0), (2, 0.0), (4, 0.0)]
    assert run.document()["completion_tokens"] == {"min": 1, "p50": 3, "p90": 3, "p99": 3, "max": 3, "mean": 2.0}


def test_sides_that_sampled_from_other_prompts_are_not_compared() -> None:
    ours = side(prompts=[["a", "b"], ["c", "d"]], ends=[1.0, 2.0])
    ours.require_the_same_prompts(side(prompts=[["b", "a"], ["c", "d"]], ends=[1.0, 2.0]))
    with pytest.raises(SystemExit, match="round 1: expected the same prompts on both sides, found others"):
        ours.require_the_same_prompts(side(prompts=[["a", "b"], ["c", "x"]], ends=[1.0, 2.0]))


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_the_peer_is_told_what_the_configuration_says(case: object) -> None:
    config = load_config(ROOT / case.config)  # type: ignore[attr-defined]
    settings = peer_settings(config)
    assert settings["learning_rate"] == config.algorithm.policy_optimizer.learning_rate
    assert (settings["kl_coef"], settings["clip_high"]) == (config.algorithm.kl_coef, config.algorithm.clip_high)
    assert (settings["loss_type"], settings["scale_rewards"]) == ("dapo", "none")
    json.dumps(settings)


def test_a_recipe_that_the_peer_has_no_words_for_is_refused() -> None:
    ppo = load_config(ROOT / "configs" / "quickstart.yaml")
    with pytest.raises(SystemExit, match="expected grpo with one reward source, found ppo"):
        peer_settings(ppo)
    warm = load_config(
        ROOT / "configs" / "quickstart_grpo.yaml", overrides=["algorithm.policy_optimizer.warmup_steps=5"]
    )
    with pytest.raises(SystemExit, match="expected float32, no warm-up and no adapters"):
        peer_settings(warm)


def test_a_peer_that_is_not_installed_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text("raise ModuleNotFoundError(\"No module named 'trl'\")\n")
    with pytest.raises(SystemExit) as refused:
        find(tmp_path)
    message = str(refused.value)
    assert f"expected TRL {VERSION}" in message and "No module named 'trl'" in message
    assert f"pip install --no-deps --target DIR trl=={VERSION}" in message
    assert "\n" not in message


def test_tales_are_ragged_with_a_heavy_tail_and_cut_at_256() -> None:
    chance = random.Random(1)
    lengths = sorted(min(256, len(tale(chance).split()) + 1) for _ in range(4000))
    assert lengths[0] >= 16 and lengths[-1] == 256
    assert 28 <= statistics.median(lengths) <= 40 and 60 <= statistics.fmean(lengths) <= 80
    assert lengths[len(lengths) * 9 // 10] > 2.5 * statistics.fmean(lengths)


def test_tales_are_the_same_each_time_and_their_reward_is_a_share(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tales(tmp_path / name, prompts=4, demonstrations=5)
    for name in ("prompts.jsonl", "demonstrations.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a" / "demonstrations.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 5
    assert 0.0 < first_synonyms(prompt="", completion=rows[0]["completion"], answer="") < 1.0
    assert first_synonyms(prompt="", completion="ba bi . oh", answer="") == 1.0
    assert first_synonyms(prompt="", completion="xx", answer="") == 0.0


def test_memory_is_that_of_the_whole_tree() -> None:
    child = "b = bytearray(b'x' * (64 << 20)); print('ready', flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        watched = Watched(started_at=0.0)
        sample(process.pid, shared_before=1 << 60, watched=watched)
        process.communicate("\n")
    assert process.returncode == 0
    assert watched.most_processes == 2
    assert 64 << 20 <= watched.peak_pss_bytes <= watched.peak_rss_bytes
    assert watched.series[0][1] < 64 << 20, "the launcher alone does not hold what its child holds"
    assert memory_of(os.getpid()).rss >= memory_of(os.getpid()).pss > 0
    assert memory_of(process.pid) == Memory() and tree(process.pid) == []


def test_a_watched_command_does_not_outlive_a_bench_that_is_killed(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    bench = (
        "import os, sys; from pathlib import Path; from bench.watched import run_watched; "
        f"run_watched([sys.executable, '-c', {child!r}], cwd=Path('.'), env=dict(os.environ), "
        f"log=Path({str(tmp_path / 'log')!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", bench], cwd=ROOT)
    until = time.monotonic() + 30
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < until, "the watched command has not started"
        time.sleep(0.05)
    process.kill()
    process.wait()
    while Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < until, "the watched command lives on"
        time.sleep(0.05)


def test_a_watched_command_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('what was wrong'); raise SystemExit(3)"]
    with pytest.raises(SystemExit, match=r"ended with 3; (?s:.)*what was wrong"):
        run_watched(command, cwd=tmp_path, env=dict(os.environ), log=tmp_path / "log")
