"""The run's own Prefect server stands back for the run: every thread that it has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flows.server import _stand_back

PROGRAM = "import threading, time; threading.Thread(target=time.sleep, args=(30,)).start(); print(flush=True)"


def test_every_thread_of_it_has_a_lower_priority() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"\n"
            before = os.getpriority(os.PRIO_PROCESS, 0)
            _stand_back(child.pid)
            threads = [int(thread.name) for thread in Path(f"/proc/{child.pid}/task").iterdir()]
            assert len(threads) == 2
            assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {10}
            assert os.getpriority(os.PRIO_PROCESS, 0) == before
        finally:
            child.kill()
