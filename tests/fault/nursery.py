"""Real runs in processes that are forked, not started: the libraries are imported once for hundreds of trials.

`python -m tests.fault.nursery` reads orders from stdin, forks a launcher for each, and says how it ended. Launcher
and workers run the code that a user runs; only `exec` and the imports after it are left out. A worker forks from the
launcher, with the environment, session and pipes that Popen would have given it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONHASHSEED": "0",
}
"""What a worker's environment holds when its libraries are imported."""

_LIBRARIES = ("torch", "transformers", "deepspeed", "vllm", "vllm.v1.worker.cpu_worker", "flows.rlhf")


class Forked(subprocess.Popen[bytes]):
    """A Popen that forks workers of this house and starts everything else as usual."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        if not isinstance(args, list | tuple) or "stages.program" not in args:
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        _, _, _, pass_fds, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[:15]
        told, tells = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.write(tells, b".")
            _become_worker(list(args), env, cwd, pass_fds, (p2cread, c2pwrite, errwrite))
        os.read(told, 1)  # as Popen returns, the child has a session of its own
        os.close(told)
        os.close(tells)
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _become_worker(
    argv: Sequence[str], env: dict[str, str] | None, cwd: str | None, keep: Sequence[int], streams: Sequence[int]
) -> NoReturn:
    code = 1
    try:
        for number, stream in enumerate(streams):
            if stream >= 0:
                os.dup2(stream, number)
        kept = sorted({0, 1, 2, *keep})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(cwd or ".")
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
        from tests.fault.hook import VARIABLE, sign_in

        while argv[0] == "/bin/sh" and os.read(0, 1) not in (b"\n", b""):  # the gate that a worker starts behind
            pass
        if VARIABLE in os.environ:
            sign_in(Path(os.environ[VARIABLE]), "worker")
        sys.argv = list(argv[argv.index("stages.program") :])
        code = _run_worker()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_worker() -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            runpy.run_module("stages.program", run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0


def _launch(order: dict[str, Any]) -> int:
    """One run in this process, which was forked for it. Returns the exit code of the command."""
    from configs.load import ConfigError
    from flows import rlhf
    from stages.artifacts.errors import RatchetError
    from tests.fault.hook import sign_in

    os.environ.update(order["env"])
    if "file_size" in order:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_size"], resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG instead
    subprocess.Popen = Forked  # type: ignore[misc]
    if order.get("cold"):
        _start_workers_for_every_stage()
    if order.get("in_turn"):
        _do_work_beside_in_turn()
    sign_in(Path(order["fault"]), "launcher")
    try:
        config = rlhf.resolve(order["config"], overrides=order["overrides"], rounds=None, seed=None)
        take_over = order.get("take_over", False)
        rlhf.run_pipeline(config, until="policy", on_change="refuse", print_lines=True, take_over=take_over)
    except RatchetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _start_workers_for_every_stage() -> None:
    from stages.workers import WorkerPool

    warm = WorkerPool.run

    def cold(pool: WorkerPool, *given: Any, **more: Any) -> dict[str, float]:
        pool.close()
        return warm(pool, *given, **more)

    WorkerPool.run = cold  # type: ignore[method-assign]


def _do_work_beside_in_turn() -> None:
    from tasks import beside

    beside.begin = lambda work: work()


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        code = _launch(order)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve until stdin closes."""
    os.environ.update(ENVIRONMENT)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _LIBRARIES:
        importlib.import_module(name)
    from vllm import LLM  # noqa: F401 - the package loads it lazily

    for path in sorted(Path("stages").glob("*/run.py")):
        importlib.import_module(f"stages.{path.parent.name}.run")
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    running: dict[int, tuple[int, float]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        buffer = b""
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    data = os.read(0, 65536)
                    if not data:
                        return
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in lines:
                        order = json.loads(line)
                        pid = _fork(order)
                        handle = os.pidfd_open(pid)
                        selector.register(handle, selectors.EVENT_READ)
                        running[handle] = (pid, time.monotonic())
                        print(json.dumps({"pid": pid, "id": order["id"]}), file=replies, flush=True)
                else:
                    selector.unregister(key.fd)
                    pid, started = running.pop(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    ended = {"pid": pid, "code": code, "seconds": time.monotonic() - started}
                    print(json.dumps(ended), file=replies, flush=True)


if __name__ == "__main__":
    main()
