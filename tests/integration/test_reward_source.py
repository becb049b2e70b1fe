"""A reward server that is down, seen from the command line: exit code 69, rollouts kept, the same command goes on."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from tests.fault.faulty_server import FaultyServer
from tests.integration.pipelines import TINY_GRPO, run_flow

TOKEN = "c4n4ry-t0ken"  # a canary


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_server_that_is_down_costs_no_rollout(tiny_store: Path, prefect_home: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/score"
    source = f"{{kind: http, url: '{url}', budget_seconds: 2, batch_size: 5, token_env: REWARD_TOKEN}}"
    # Another temperature, so that the rollouts are this run's own.
    more = ("--rounds", "1", "--set", "sampling.temperature=0.9", "--set", f"rewards=[{source}]")
    refused = run_flow(TINY_GRPO, tiny_store, *more, home=prefect_home)
    assert refused.code == 2 and "expected a token in the environment variable REWARD_TOKEN" in refused.err

    down = run_flow(TINY_GRPO, tiny_store, *more, home=prefect_home, REWARD_TOKEN=TOKEN)
    assert down.code == 69, down.out + down.err
    first, second = down.err.splitlines()
    assert first.startswith(
        f"error: reward source 'http': expected rewards from {url} within 2 s (budget_seconds), found"
    )
    assert "the last one: ConnectError: Connection refused. No reward was made up. The generations are kept" in first
    assert second == "what was finished is kept; run the same command again to go on"
    assert down.made() == ["round-000-generate_rollouts"]

    started = time.monotonic()
    with FaultyServer("503", share=0.3, port=port, secrets=("c4n4ry-body",)) as server:
        up = run_flow(TINY_GRPO, tiny_store, *more, home=prefect_home, REWARD_TOKEN=TOKEN)
        assert up.code == 0, up.out + up.err
    assert "round-000-generate_rollouts" in up.reused() and "round-000-score_rollouts" in up.made()
    answered = [name for ids, failed in server.requests if not failed for name in ids]
    assert len(answered) == len(set(answered)) == 32
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {TOKEN}"}

    files = [path for root in (tiny_store, prefect_home) for path in root.rglob("*") if path.is_file()]
    hits = [str(path) for path in files if b"c4n4ry" in path.read_bytes()]
    assert not hits and "c4n4ry" not in down.out + down.err + up.out + up.err
    print(
        f"R13: exit code 69, 32 rollouts kept; with the server up done in {time.monotonic() - started:.0f} s, none "
        "sampled again"
    )
    print(f"S05: {len(files)} files of store and Prefect, 2 canaries: {len(hits)} hits")
