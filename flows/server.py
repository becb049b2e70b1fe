"""Prefect's server for one run from the command line: on loopback, and gone when the run is, however that ends.

The server is a view of the run. When it is gone, for whatever reason, the run goes on without it.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from os import environ
from pathlib import Path
from socket import create_server
from typing import NoReturn
from urllib.parse import urlsplit

import prefect
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from configs.secrets import redact
from stages.artifacts.errors import InputError, RatchetError
from stages.process import ChildProcess

_START_SECONDS = 120.0
_ATTEMPTS = 3
_ANSWER_SECONDS = 2.0
_NICE = 10
# Prefect's client would ask a server that is gone for a minute, and one that hangs for seven.
_OWN_SERVER = {PREFECT_CLIENT_MAX_RETRIES: 3, PREFECT_API_REQUEST_TIMEOUT: 15.0}
# What Prefect itself sets for the server that it starts where there is none.
_EMBEDDED = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}

_until_the_end = ExitStack()


@contextmanager
def prefect_server(*, log: Path) -> Iterator[None]:
    """The server that Prefect is set up to use; where there is none, one that ends with this process.

    Prefect would start one by itself, but in the terminal's process group, where Ctrl-C ends it before the run can
    say goodbye, and without a lifeline, so that it outlives a kill -9 of the run. Raises InputError, RatchetError.
    """
    url = PREFECT_API_URL.value()
    if url:
        with get_client(sync_client=True) as client:
            problem = client.api_healthcheck()
        if problem is not None:
            message = f"PREFECT_API_URL: expected a Prefect server at {url}, found none ({problem})"
            raise InputError(redact(message))
        yield
        return
    server, url = _start(log)
    # Prefect sends its last lines and events when the interpreter exits; what is registered first runs after that.
    atexit.register(server.close, grace_seconds=5.0)
    with temporary_settings({PREFECT_API_URL: url, **_OWN_SERVER}):
        yield


def server_answers() -> bool:
    """Whether Prefect's server says anything at all, asked once and for two seconds."""
    url = urlsplit(PREFECT_API_URL.value() or "")
    if not url.hostname:
        return False
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = kind(url.hostname, url.port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", f"{url.path.rstrip('/')}/health")
        connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True


def stop_asking() -> None:
    """Where this run's own server is gone, let Prefect's client ask it once from now on; it will not come back."""
    if PREFECT_CLIENT_MAX_RETRIES.value() == _OWN_SERVER[PREFECT_CLIENT_MAX_RETRIES] and not server_answers():
        _until_the_end.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}))


def leave_at_once(code: int) -> NoReturn:
    """End this process without Prefect's farewell, which waits seconds for each event that nobody will ever take.

    Everything of ours is on the disk, and lifelines end what is left of our processes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(log: Path) -> tuple[ChildProcess, str]:
    for _ in range(_ATTEMPTS):
        with create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(prefect.__file__).parents[1]), "--factory"]
        command += ["prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--log-level", "error", "--lifespan", "on"]
        server = ChildProcess(command, env={**environ, **_EMBEDDED}, log=log)
        try:
            if _answers(server, port):
                _stand_back(server.pid)
                return server, f"http://127.0.0.1:{port}/api"
        except BaseException:
            server.kill()
            raise
        server.kill()
    raise RatchetError(f"Prefect's server did not start in {_ATTEMPTS} attempts; log: {log}")


def _stand_back(pid: int) -> None:
    """Let the run's own processes go first where cores are scarce: what they wait for is not what this one writes."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICE)
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


def _answers(server: ChildProcess, port: int) -> bool:
    """Wait until the server is up. False if it ended, which it does if somebody else took the port."""
    deadline = time.monotonic() + _START_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        connection = HTTPConnection("127.0.0.1", port, timeout=5.0)
        try:
            connection.request("GET", "/api/health")
            if connection.getresponse().status == 200:
                return True
        except (OSError, HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    return False
