"""`python -m flows.rlhf` as a person meets it: refusals, replays, interruptions, tracking."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from wandb.proto import wandb_internal_pb2

from tests.integration.pipelines import ROOT, TINY_GRPO, command, environment, heed_interrupts, run_flow

TINY_STAGES = 22
RULE = "rewards=[{kind: function, function: '%s'}]"
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "no such file": (["--config", "nosuch.yaml"], ["nosuch.yaml", "no such configuration file"]),
    "misspelt key": (["--set", "algorithm.kl_ceof=0.1"], ["algorithm.grpo.kl_ceof", "unknown key"]),
    "two faults": (["--set", "sede=1", "--set", "rounds.count=many"], ["sede", "rounds.count", "'many'"]),
    "no value": (["--set", "algorithm.kl_coef"], ["algorithm.kl_coef", "key=value"]),
    "too few rounds": (["--rounds", "0"], ["rounds.count", "greater than or equal to 1"]),
    "missing data": (["--set", "data.prompts={kind: files, path: nosuch.jsonl}"], ["nosuch.jsonl"]),
    "no such module": (["--set", RULE % "nosuch:rule"], ["'nosuch:rule'", "PYTHONPATH"]),
    "no such function": (["--set", RULE % "tests.integration.pipelines:nosuch"], ["'nosuch'", "pipelines.py"]),
    "store in a file": (["--set", "store=LICENSE/x"], ["store", "expected a directory"]),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_bad_input_is_refused_in_seconds_in_one_line_each(case: str, tmp_path: Path, prefect_home: Path) -> None:
    arguments, words = REFUSED[case]
    started = time.monotonic()
    result = run_flow(TINY_GRPO, tmp_path / "store", *arguments, home=prefect_home)
    assert time.monotonic() - started < 10.0
    assert result.code == 2, result.out + result.err
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == (2 if case == "two faults" else 1) and all(line.startswith("error: ") for line in lines), lines
    assert all(word in result.err for word in words), lines
    assert not (tmp_path / "store" / "runs").exists(), "nothing was started"


def test_a_server_that_is_not_there_is_refused(tmp_path: Path, prefect_home: Path) -> None:
    url = "http://127.0.0.1:9/api"
    result = run_flow(TINY_GRPO, tmp_path, home=prefect_home, PREFECT_API_URL=url)
    assert result.code == 2, result.out + result.err
    assert result.err.startswith(f"error: PREFECT_API_URL: expected a Prefect server at {url}")
    assert len(result.err.splitlines()) == 1


def test_help_names_the_exit_codes(prefect_home: Path, tmp_path: Path) -> None:
    result = run_flow(TINY_GRPO, tmp_path, "--help", home=prefect_home)
    assert result.code == 0
    assert "exit codes: 0 done; 2 " in result.out


def test_a_replay_says_so_stage_by_stage_in_seconds(tiny_store: Path, prefect_home: Path) -> None:
    started = time.monotonic()
    result = run_flow(TINY_GRPO, tiny_store, home=prefect_home)
    assert time.monotonic() - started < 10.0
    assert result.code == 0 and result.err == ""
    assert len(result.reused()) == TINY_STAGES and result.made() == []
    assert f"{TINY_STAGES} stages, 0 run now, {TINY_STAGES} already done" in result.out


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_an_interrupted_run_leaves_no_process_and_goes_on(name: str, tmp_path: Path, prefect_home: Path) -> None:
    number = signal.Signals[name]
    argv = command(TINY_GRPO, tmp_path, "--until", "sft")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes |= {"start_new_session": True, "preexec_fn": heed_interrupts}
    flow = subprocess.Popen(argv, cwd=ROOT, env=environment(prefect_home), **pipes)
    for line in flow.stdout:
        if line.startswith("prepare_datasets  "):  # done; its progress has a colon
            break
    children = psutil.Process(flow.pid).children(recursive=True)
    assert len(children) >= 3, "a server, a generator, a trainer"
    listening = {c.laddr.ip for child in children for c in child.net_connections() if c.status == "LISTEN"}
    assert listening <= {"127.0.0.1"}
    # Ctrl-C reaches the terminal's whole process group.
    os.killpg(flow.pid, number) if name == "SIGINT" else os.kill(flow.pid, number)
    _, gone = psutil.wait_procs(children, timeout=10.0)[::-1]
    assert len(gone) == len(children)
    out, err = flow.communicate(timeout=10.0)
    assert flow.returncode == (-9 if name == "SIGKILL" else 128 + number)
    assert "Traceback" not in out + err
    if name != "SIGKILL":
        assert err.splitlines() == [
            f"interrupted by {name}",
            "what was finished is kept; run the same command again to go on",
        ]
        again = run_flow(TINY_GRPO, tmp_path, "--until", "sft", home=prefect_home)
        assert again.code == 0, again.out + again.err
        assert again.reused() == ["prepare_datasets"] and again.made() == ["train_sft"]


def test_wandb_offline_logs_every_round_under_the_run_directory(tiny_store: Path, prefect_home: Path) -> None:
    more = ("--set", "tracking.wandb=offline", "--set", "evaluation.samples=3")
    result = run_flow(TINY_GRPO, tiny_store, *more, home=prefect_home)
    assert result.code == 0, result.out + result.err
    assert result.err == ""
    (file,) = (tiny_store / "runs").glob("*/wandb/offline-run-*/*.wandb")
    assert f"wandb: {file.parent}" in result.out
    rounds = json.loads((file.parents[2] / "summary.json").read_text())["rounds"][1:]
    logged = list(history(file))
    assert [row.pop("_step") for row in logged] == [0, 1]
    for row, expected in zip(logged, rounds, strict=True):
        assert {name: row[name] for name in expected if name != "round"} == pytest.approx(
            {name: value for name, value in expected.items() if name != "round"}
        )


def history(file: Path) -> Iterator[dict[str, float]]:
    """The logged rows of a .wandb file: protobuf records in LevelDB's log format."""
    data, position, whole = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                yield {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
