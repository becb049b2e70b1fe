"""The deployments on a real Prefect server and worker: parameters, names, states, artifacts, retry, cancel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.pipelines import ROOT, TINY_GRPO, environment, heed_interrupts

Json = dict[str, Any]
RULE = "def reward(*, prompt, completion, answer):\n    "
ILL = RULE + "raise RuntimeError('the judge is ill')\n"
WELL = RULE + "return float(len(completion) == len(answer))\n"
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def wait(until: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """What `until` returns, once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := until():
            return found
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds} s: {what}")


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=15.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Deployed:
    """A Prefect server with the deployments registered and one worker that serves them."""

    port: int
    env: dict[str, str]
    logs: Path
    worker: psutil.Process

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One command of the Prefect CLI; both streams in stdout."""
        argv = [str(Path(sys.executable).with_name("prefect")), *arguments]
        return subprocess.run(
            argv, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
        )

    def deploy_run(self, overrides: Json, *more: str) -> tuple[str, subprocess.CompletedProcess[str]]:
        """Run the deployment rlhf/grpo on the tiny configuration; its flow run's id."""
        given = (f"config={TINY_GRPO}", f"overrides={json.dumps(overrides)}")
        done = self.prefect("deployment", "run", "rlhf/grpo", *(w for g in given for w in ("--param", g)), *more)
        assert "UUID: " in done.stdout, done.stdout
        return done.stdout.split("UUID: ")[1].split()[0], done

    def api(self, path: str, body: Json | None = None) -> Any:
        """Ask the server."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30.0)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(
                "GET" if body is None else "POST", f"/api/{path}", data, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, text
            return json.loads(text)
        finally:
            connection.close()

    def flow_run(self, run: str) -> Json:
        """The flow run's record."""
        found: Json = self.api(f"flow_runs/{run}")
        return found

    def of_run(self, what: str, run: str, **more: Any) -> list[Json]:
        """Rows of a kind that belong to a flow run."""
        key = "flow_run_id" if what in ("logs", "artifacts") else "id"
        table = what if what in ("logs", "artifacts") else "flow_runs"
        found: list[Json] = self.api(f"{what}/filter", {table: {key: {"any_": [run]}}, "limit": 200, **more})
        return found

    def states(self, run: str, *, since: str = "") -> dict[str, str]:
        """State of every task of a flow run by name; rows arrive a moment after the run's own state."""

        def settled() -> dict[str, str] | None:
            rows = [r for r in self.of_run("task_runs", run) if (r["start_time"] or "") >= since]
            ended = all(row["state_type"] in ENDED for row in rows)
            return {row["name"]: row["state_name"] for row in rows} if ended and len(rows) >= 6 else None

        time.sleep(1.0)
        states: dict[str, str] = wait(settled, seconds=20.0, what="task runs recorded")
        return states

    def log(self, run: str) -> str:
        """What the flow run logged, as the UI shows it."""
        return "\n".join(row["message"] for row in self.of_run("logs", run, sort="TIMESTAMP_ASC"))


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rules")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, rules: Path) -> Iterator[Deployed]:
    home = tmp_path_factory.mktemp("served")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = environment(
        home,
        PREFECT_API_URL=f"http://127.0.0.1:{port}/api",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DO_NOT_TRACK="1",
        PREFECT_WORKER_QUERY_SECONDS="2",
        COLUMNS="400",
        PYTHONPATH=os.pathsep.join([str(rules), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    prefect = str(Path(sys.executable).with_name("prefect"))
    open_files = [(home / f"{name}.log").open("wb") for name in ("server", "worker")]
    common: dict[str, Any] = {"cwd": ROOT, "env": env, "stderr": subprocess.STDOUT, "start_new_session": True}
    common["preexec_fn"] = heed_interrupts
    argv = [prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(argv, stdout=open_files[0], **common)
    worker: subprocess.Popen[bytes] | None = None
    try:
        served = Deployed(port=port, env=env, logs=home, worker=psutil.Process())
        wait(lambda: _healthy(served), seconds=60.0, what="server up")
        made = served.prefect("work-pool", "create", "ratchet", "--type", "process")
        assert made.returncode == 0, made.stdout
        deployed = served.prefect("--no-prompt", "deploy", "--all")
        assert deployed.returncode == 0, deployed.stdout
        worker = subprocess.Popen([prefect, "worker", "start", "--pool", "ratchet"], stdout=open_files[1], **common)
        served.worker = psutil.Process(worker.pid)
        yield served
    finally:
        for process in filter(None, (worker, server)):
            end(process)
        for file in open_files:
            file.close()


def _healthy(served: Deployed) -> bool:
    try:
        return served.api("health") is True
    except OSError:
        return False


@pytest.fixture(scope="module")
def overrides(tiny_store: Path) -> Json:
    source = {"kind": "function", "function": "rule_of_this_house:reward"}
    return {"store": str(tiny_store), "rewards": [source]}


@pytest.fixture(scope="module")
def failed(house: Deployed, rules: Path, overrides: Json) -> str:
    """A flow run whose reward function raised in the first round; the rest of the store was there before."""
    (rules / "rule_of_this_house.py").write_text(ILL)
    run, done = house.deploy_run(overrides, "--watch", "--watch-timeout", "150")
    assert done.returncode == 1, done.stdout
    assert house.flow_run(run)["state_type"] == "FAILED"
    return run


@dataclass
class Attempt:
    """A finished flow run: its id, and the states of its tasks."""

    run: str
    states: dict[str, str]


@pytest.fixture(scope="module")
def retried(house: Deployed, rules: Path, failed: str) -> Attempt:
    (rules / "rule_of_this_house.py").write_text(WELL)
    before = house.flow_run(failed)["end_time"]
    asked = house.prefect("flow-run", "retry", failed)
    assert asked.returncode == 0, asked.stdout
    wait(lambda: house.flow_run(failed)["run_count"] == 2, seconds=60.0, what="retry picked up")
    wait(lambda: house.flow_run(failed)["state_type"] in ENDED, seconds=150.0, what="retry ended")
    return Attempt(failed, house.states(failed, since=before))


@pytest.fixture(scope="module")
def second(house: Deployed, retried: Attempt, overrides: Json) -> Attempt:
    run, done = house.deploy_run(overrides, "--watch", "--watch-timeout", "60")
    assert done.returncode == 0, done.stdout
    return Attempt(run, house.states(run))


def test_all_deployments_are_registered(house: Deployed) -> None:
    names = {row["name"]: row["work_pool_name"] for row in house.api("deployments/filter", {})}
    assert names == {"full-pipeline": "ratchet", "grpo": "ratchet", "reward-model": "ratchet"}


@pytest.mark.parametrize("parameter", ["seed=-1", "sede=3", "until=nonsense", "rounds=0", "overrides=[1]"])
def test_a_bad_parameter_is_refused_by_name(house: Deployed, parameter: str) -> None:
    done = house.prefect("deployment", "run", "rlhf/grpo", "--param", parameter)
    assert done.returncode == 1
    assert f"'{parameter.split('=')[0]}'" in done.stdout
    assert "UUID" not in done.stdout, "no flow run was made"


def test_a_bad_override_fails_the_run_in_seconds_and_names_the_key(house: Deployed) -> None:
    run, done = house.deploy_run({"algorithm.kl_ceof": 0.1}, "--watch", "--watch-timeout", "60")
    assert done.returncode == 1, done.stdout
    record = house.flow_run(run)
    assert record["name"] == "tiny_grpo" and record["state_type"] == "FAILED"
    assert "algorithm.grpo.kl_ceof: unknown key" in record["state"]["message"]
    assert record["total_run_time"] < 5.0
    assert "Traceback" not in wait(lambda: house.log(run), seconds=10.0, what="logs")


def test_a_failed_stage_fails_the_run_and_says_how_to_go_on(house: Deployed, failed: str) -> None:
    assert "the judge is ill" in house.flow_run(failed)["state"]["message"]
    states = house.states(failed)
    assert states["round-000 generate_rollouts"] == "Cached"
    assert states["round-000 score_rollouts"] == "Failed"
    assert "round-000 update_policy" not in states
    log = house.log(failed)
    assert f"prefect flow-run retry {failed}" in log
    assert "Traceback" not in log


def test_retry_goes_on_where_it_failed(retried: Attempt, house: Deployed) -> None:
    assert house.flow_run(retried.run)["state_type"] == "COMPLETED"
    done = ("prepare_datasets", "train_sft", "before evaluate_policy", "round-000 generate_rollouts")
    assert {name: retried.states[name] for name in done} == dict.fromkeys(done, "Cached")
    made = ("round-000 score_rollouts", "round-000 update_policy", "after-000 evaluate_policy")
    assert {name: retried.states[name] for name in made} == dict.fromkeys(made, "Completed")
    assert retried.states["round-001 update_policy"] == "Completed"


def test_the_same_deployment_again_finds_everything_done(second: Attempt) -> None:
    assert len(second.states) == 22
    assert second.states == dict.fromkeys(second.states, "Cached")


def test_run_and_tags_are_readable(house: Deployed, second: Attempt, tiny_store: Path) -> None:
    record = house.flow_run(second.run)
    assert record["name"].startswith("tiny-")
    assert (tiny_store / "runs" / record["name"] / "summary.json").exists(), "the run's name is its directory's"
    assert set(record["tags"]) == {"rlhf", "grpo"}


@pytest.mark.parametrize("which", ["retried", "second"])
def test_artifacts_show_rounds_rollouts_progress_and_summary(
    house: Deployed, which: str, request: pytest.FixtureRequest
) -> None:
    attempt: Attempt = request.getfixturevalue(which)
    newest_first = house.of_run("artifacts", attempt.run, sort="UPDATED_DESC")
    artifacts = {row["key"]: row for row in reversed(newest_first) if row["key"]}
    assert set(artifacts) == {"rounds", "round-000-rollouts", "round-001-rollouts", "progress", "summary"}
    table = json.loads(artifacts["rounds"]["data"])
    assert [row["round"] for row in table] == ["before", "0", "1"]
    assert all(set(row) >= {"held_out", "reward", "kl", "entropy", "tokens"} for row in table)
    assert float(artifacts["progress"]["data"]) == 100.0
    link = artifacts["round-001-rollouts"]["data"]
    assert Path(link[1:].split("](")[0]).is_file() and "(file://" in link
    assert "prefect deployment run rlhf/grpo --param" in artifacts["summary"]["data"]


def test_no_result_is_kept_by_prefect(house: Deployed, second: Attempt) -> None:
    assert not (house.logs / "storage").exists()


def test_cancel_ends_every_process(house: Deployed, tmp_path: Path) -> None:
    run, _ = house.deploy_run({"store": str(tmp_path), "seed": 5})
    wait(lambda: list(tmp_path.glob("artifacts/prepare_datasets/*")), seconds=60.0, what="first stage done")
    children = house.worker.children(recursive=True)
    assert len(children) >= 3, "the flow, a generator, a trainer"
    for process in (*children, house.worker):
        addresses = {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"}
        assert addresses <= {"127.0.0.1"}, process
    assert house.prefect("flow-run", "cancel", run).returncode == 0
    _, alive = psutil.wait_procs(children, timeout=30.0)
    assert alive == []
    wait(lambda: house.flow_run(run)["state_type"] == "CANCELLED", seconds=30.0, what="state Cancelled")
