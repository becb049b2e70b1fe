"""Where the peer is installed, and the environment in which it runs. Imports nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.flow_run import environment
from bench.result import ROOT

VERSION = "1.16.0"
HOW = f"where TRL is: pip install --no-deps --target DIR trl=={VERSION}, then --peer-path DIR"
_LOOK = (
    "import json, trl, accelerate; print(json.dumps({'trl': trl.__version__, 'accelerate': accelerate.__version__}))"
)


@dataclass(frozen=True)
class Peer:
    """path: a directory to import TRL from, or None where it is installed beside us. versions: of what was found."""

    path: Path | None
    versions: dict[str, str]

    def environment(self, scratch: Path) -> dict[str, str]:
        """Of the peer's process: the same threads, caches and key-value cache as ours, and TRL to be found."""
        places = [str(p) for p in (_name_for_vllm(scratch), self.path, ROOT) if p is not None]
        own = {
            "PYTHONPATH": ":".join(places),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
        }
        return environment(scratch, own)


def find(path: Path | None) -> Peer:
    """TRL where it is said to be, or beside us. Raises SystemExit that says what to install."""
    peer = Peer(path=path.resolve() if path else None, versions={})
    scratch = ROOT if path is None else path
    env = {**environment(scratch), "PYTHONPATH": str(peer.path or "")}
    found = subprocess.run([sys.executable, "-c", _LOOK], env=env, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        reason = found.stderr.strip().splitlines()[-1] if found.stderr.strip() else "nothing"
        raise SystemExit(f"expected TRL {VERSION} in {path or 'this environment'}, found {reason}; {HOW}")
    versions: dict[str, str] = json.loads(found.stdout.splitlines()[-1])
    if versions["trl"] != VERSION:
        raise SystemExit(f"expected TRL {VERSION} in {path or 'this environment'}, found {versions['trl']}; {HOW}")
    return Peer(path=peer.path, versions=versions)


def _name_for_vllm(scratch: Path) -> Path | None:
    """A distribution named vllm where only vllm-cpu is installed: the peer asks for it by that name."""
    try:
        version("vllm")
        return None
    except PackageNotFoundError:
        number = f"{version('vllm-cpu')}+cpu"  # vLLM itself reads from it that it is built for CPU
    directory = scratch / "peer-names"
    info = directory / f"vllm-{number}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
    return directory
