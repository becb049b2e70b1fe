"""Switches of the engines that open a control port or run foreign code never reach a worker."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stages.shelter import OPENERS, kernel_directory
from stages.workers import PoolSpec, WorkerPool
from tests.architecture.test_imports import MODULES, imported, short


@pytest.mark.parametrize("kind", ["generator", "trainer"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_s08_no_worker_gets_a_switch_that_opens_it(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (*OPENERS, "VLLM_HOST_IP", "VLLM_ENABLE_V1_MULTIPROCESSING", "GLOO_SOCKET_IFNAME", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, "1")
    gpus = (0,) if device == "cuda" else ()
    pool = WorkerPool(PoolSpec(kind, device, ranks=1, threads=1, gpus=gpus), logs=tmp_path)  # type: ignore[arg-type]
    env = pool._environment(0, tmp_path / "rendezvous")
    assert OPENERS & env.keys() == set()
    assert env["VLLM_HOST_IP"] == "127.0.0.1" and env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["DO_NOT_TRACK"] == env["VLLM_NO_USAGE_STATS"] == env["HF_HUB_DISABLE_TELEMETRY"] == "1"
    private = tmp_path / "ratchet"
    assert private.stat().st_mode & 0o777 == 0o700
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(env[name]).is_relative_to(private)
    if kind == "generator":
        assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "the engine has no process and no socket of its own"


def test_a_lock_that_a_killed_builder_left_is_freed_and_a_living_ones_is_kept(tmp_path: Path) -> None:
    stale, held = tmp_path / "one" / "lock", tmp_path / "two" / "lock"
    for path in (stale, held):
        path.parent.mkdir()
        path.touch()
    with held.open():
        assert kernel_directory({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == tmp_path
        assert held.exists() and not stale.exists()
    kernel_directory({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert not held.exists()


def test_s08_the_engine_is_a_library_and_never_a_server() -> None:
    servers = ("vllm.entrypoints", "uvicorn", "fastapi", "http.server", "socketserver")
    for path in MODULES:
        if short(path) == "stages/reward_server.py":
            continue  # a program of its own, started by a person; it holds no engine
        found = [name for name in imported(path) if name.startswith(servers)]
        assert not found, f"{short(path)} imports {found}"
    engine = next(path for path in MODULES if path.name == "vllm_engine.py")
    names = {a.name for n in ast.walk(ast.parse(engine.read_text())) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert {"LLM", "SamplingParams"} <= names and "AsyncLLM" not in names
    print(f"S08: {len(OPENERS)} switches stripped from 4 kinds of worker; no server in {len(MODULES)} modules")
