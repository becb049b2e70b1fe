"""One full run under audit, in a network without a route where the kernel lets us: all runtime tests read it."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import psutil

from stages.shelter import OPENERS
from tests.integration.pipelines import ROOT, TINY_PPO, command
from tests.security.payloads import pickled_canary

LEAKY = "rewards=[{kind: reward_model}, {kind: function, function: 'tests.security.leaky:reward', weight: 0.1}]"
SECRET_NAMES = (
    *("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "JUDGE_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "GITHUB_TOKEN", "CI_JOB_TOKEN"),
    *("DATABASE_PASSWORD", "MYSQL_PWD", "PGPASSWORD", "SERVICE_CREDENTIALS", "SLACK_BOT_TOKEN", "NPM_TOKEN"),
    *("SSH_PASSPHRASE", "KAGGLE_KEY", "REMOTE_STORE_URL"),
)
SECRETS = {name: f"canary{i:02d}x{name[::-1].replace('_', '').lower()}9f3a" for i, name in enumerate(SECRET_NAMES)}
_SAMPLE_SECONDS = 0.3
# The state in which a socket takes what others send, by the kernel's table: listening, or bound and not connected.
_WAITING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}


@dataclass
class AuditedRun:
    """The run, what it printed, and what was seen of it. Everything that it wrote lies under `root`."""

    root: Path
    isolated: bool
    why_not: str = ""
    code: int = -1
    resumed: int = -1
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    samples: int = 0
    sockets: set[tuple[str, str, int]] = field(default_factory=set)
    workers: set[int] = field(default_factory=set)
    openers: set[str] = field(default_factory=set)
    planted: list[Path] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def canary(self) -> Path:
        """What exists only if a payload was run."""
        return self.root / "canary"

    @property
    def prefect_home(self) -> Path:
        return self.root / "prefect"

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What the audit hooks of all processes noted."""
        files = sorted((self.root / "audit").glob("*.jsonl"))
        return [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]

    @property
    def processes(self) -> int:
        """How many Python processes were under audit."""
        return len(list((self.root / "audit").glob("*.jsonl")))

    @property
    def without_route(self) -> int:
        """How often anything of the run, Python or not, tried to leave this host."""
        return sum(int(line) for line in (self.root / "count").read_text(encoding="utf-8").split())

    def of(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names."""
        return [event for event in self.events if event["event"] in names]


def environment(root: Path) -> dict[str, str]:
    """A home, caches and a Prefect of its own, the audit, and the canaries."""
    foreign = ("PREFECT_", "XDG_", "VLLM_", "WANDB_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    folders = {"HOME": "home", "XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state", "TMPDIR": "tmp"}
    secrets = SECRETS | {"REMOTE_STORE_URL": f"s3://user:{SECRETS['REMOTE_STORE_URL']}@store.example/bucket"}
    return {
        **inherited,
        **{name: str(root / folder) for name, folder in folders.items()},
        **secrets,
        "PREFECT_HOME": str(root / "prefect"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "security" / "site"), inherited.get("PYTHONPATH", "")]),
        "RATCHET_TEST_AUDIT": str(root / "audit"),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "pickle",
    }


def namespaces(root: Path) -> tuple[list[str], str]:
    """The words before a command that give it namespaces of its own; or none, and why."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return [], "there is no `unshare` (util-linux)"
    words = [unshare, "--net", "--mount", "--uts", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    argv = [*words, sys.executable, "-m", "tests.security.isolated", str(root / "count")]
    tried = subprocess.run([*argv, "true"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    return (argv, "") if tried.returncode == 0 else ([], (tried.stderr.strip().splitlines() or ["no reason given"])[-1])


def audited_run(root: Path) -> AuditedRun:
    """Run the whole of tiny_ppo.yaml, wandb (offline) and a talkative rule included; then the last update by hand.

    What is run by hand starts cold, so DeepSpeed loads a state from the disk.
    """
    for folder in ("home", "cache", "state", "tmp", "audit"):
        (root / folder).mkdir(mode=0o700, exist_ok=True)
    inside, why_not = namespaces(root)
    run = AuditedRun(root, isolated=bool(inside), why_not=why_not)
    run.planted = plant(run)
    more = ("--set", LEAKY, "--set", "tracking.wandb=offline", "--set", "rounds.snapshot_every=1")
    argv = [*inside, *command(TINY_PPO, run.store, *more)]
    started = time.monotonic()
    with (root / "out").open("w") as out, (root / "err").open("w") as err:
        run.code = _watched(run, argv, stdout=out, stderr=err)
    run.out, run.err = (root / "out").read_text(), (root / "err").read_text()
    job = max(run.store.glob("runs/*/jobs/round-*-update_policy.json"), default=root / "none")
    argv = [*inside, sys.executable, "-m", "stages.update_policy.run", str(job), "--out", str(root / "again")]
    with (root / "resumed").open("w") as out:
        run.resumed = _watched(run, argv, stdout=out, stderr=out)
    run.seconds = time.monotonic() - started
    return run


def plant(run: AuditedRun) -> list[Path]:
    """Payloads where libraries look by themselves: a result of Prefect's, and caches where others may have been."""
    payload = pickled_canary(run.canary)
    code = f"open({str(run.canary)!r}, 'w').close()\n".encode()
    user = f"torchinductor_{getpass.getuser()}"
    files = {
        run.prefect_home / "storage" / "result": payload,
        run.root / "cache" / "vllm" / "torch_compile_cache" / "x" / "vllm_compile_cache.py": code,
        run.root / "cache" / "vllm" / "modelinfos" / "vllm-model_executor-models-llama.json": payload,
        run.root / "tmp" / user / "fxgraph" / "aa" / "aaaa" / "entry": payload,
        run.root / "tmp" / user / "cache" / "entry.py": code,
        run.root / "home" / ".triton" / "cache" / "x" / "kernel.py": code,
    }
    for path, data in files.items():
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        path.write_bytes(data)
    for folder in ("prefect", "cache", "tmp", "home"):
        for path in (run.root / folder, *(run.root / folder).rglob("*")):
            path.chmod(0o700)
    return list(files)


def _watched(run: AuditedRun, argv: list[str], **pipes: IO[str]) -> int:
    process = subprocess.Popen(argv, cwd=ROOT, env=environment(run.root), umask=0o022, **pipes)
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(run, process.pid, ended))
    watcher.start()
    try:
        return process.wait(timeout=500)
    finally:
        process.kill()
        ended.set()
        watcher.join()


def _watch(run: AuditedRun, pid: int, ended: threading.Event) -> None:
    """Note every socket on which a process of the run waits for others, until the run has ended."""
    while not ended.wait(_SAMPLE_SECONDS):
        try:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        run.samples += 1
        waiting = {table: list(_waiting(pid, table, state)) for table, state in _WAITING.items()}
        for process in family:
            run.sockets |= set(_owned(process, [found for rows in waiting.values() for found in rows]))
            _look_at_worker(run, process)


def _waiting(pid: int, table: str, state: str) -> Iterator[tuple[str, str, int]]:
    """(inode, address, port) of each socket in the network of `pid` that takes what others send."""
    try:
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return
    for words in (line.split() for line in lines):
        if words[3] == state:
            address, _, port = words[1].partition(":")
            yield words[9], _address(address), int(port, 16)


def _owned(process: psutil.Process, waiting: list[tuple[str, str, int]]) -> Iterator[tuple[str, str, int]]:
    """(program, address, port) of those that the process holds."""
    try:
        links = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
        for inode, address, port in waiting:
            if f"socket:[{inode}]" in links:
                yield " ".join(process.cmdline()[:4]), address, port
    except (OSError, psutil.Error):
        return


def _look_at_worker(run: AuditedRun, process: psutil.Process) -> None:
    """Note once of each worker which switches it was given."""
    try:
        if process.pid not in run.workers and "stages.program" in process.cmdline():
            run.workers.add(process.pid)
            run.openers |= OPENERS & process.environ().keys()
    except psutil.Error:
        return


def _address(text: str) -> str:
    """The kernel's hexadecimal (32-bit words in the host's order) as people write it."""
    raw = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
