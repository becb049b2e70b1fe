"""`python -m bench.gpu --shape 1.5b`: rounds of the stages alone, with random weights of a known shape, on one GPU.

No Prefect and no flow: jobs go to resident workers, artifacts are committed, as a task does it. Generator and trainer
take turns on the device. Each is held against what the same process reached after its first job: generation against
bytes per second of a copy and operations per second of matrix products, training against those products.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_rounds import SEED, SHAPES, make_rounds
from bench.machine import machine
from bench.result import median, shown, write_result
from bench.stages_alone import House
from stages.limits import Limits


@dataclass
class Memory:
    """The most that was in use on the GPU while the context lasted, by nvidia-smi; 0 where there is none."""

    most_bytes: int = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look five times a second."""
        if shutil.which("nvidia-smi") is None:
            yield
            return
        stop = threading.Event()

        def look() -> None:
            command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
            while not stop.wait(0.2):
                found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
                self.most_bytes = max(self.most_bytes, int(found) << 20 if found.isdigit() else 0)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def main() -> int:
    """Measure and write the result."""
    asked = _asked()
    began = machine()
    scratch = asked.scratch or Path(tempfile.mkdtemp(prefix="bench-ratchet-"))
    shape, memory = SHAPES[asked.shape], Memory()
    limits = _limits(asked.device, asked.dtype)
    house = House(store=scratch / "store", device=asked.device, threads=asked.threads)
    house.store.mkdir(parents=True)
    try:
        with memory.watched():
            make_rounds(house, shape, asked)
    finally:
        house.close()
    figures = _figures(house, asked)
    write_result(
        asked.out or Path(f"bench/results/gpu_{asked.shape}.json"),
        began=began,
        seeds=[SEED],
        shape=shape.model_dump(),
        asked={k: v for k, v in vars(asked).items() if not isinstance(v, Path)},
        limits_before=vars(limits),
        **figures,
        peak_gpu_bytes=memory.most_bytes or None,
        goals={"decode_share_of_roofline": 0.5, "update_mfu": 0.3},
        stages=house.rows,
    )
    print(
        f"{asked.shape}: {shown(figures['generated_tokens_per_second'], digits=0)} tokens/s, "
        f"{shown(figures['decode_share_of_roofline'])} of the decode roofline (goal 0.5), update at "
        f"{shown(figures['update_mfu'])} of measured matrix products (goal 0.3)"
    )
    return 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5b")
    parser.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo", help="ppo: with a critic of that shape")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="the first is warm-up")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512, help="longest completion; random weights hardly end earlier")
    parser.add_argument("--concurrent", type=int, default=2048, help="sequences in flight")
    parser.add_argument("--microbatch-tokens", type=int, default=16_384)
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--eager", action="store_true", help="without vLLM's graphs")
    parser.add_argument("--gpu-memory", type=float, default=0.8, help="vLLM's share while it is awake")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error(f"--rounds: expected at least 2, of which the first is warm-up, found {asked.rounds}")
    return asked


def _limits(device: str, dtype: str) -> Limits:
    """For the record, in a process of its own; shares are of what each worker measured after its first job."""
    command = [sys.executable, "-m", "bench.device_limits", device, dtype]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return Limits(bytes_per_second=float(found[-2]), flops_per_second=float(found[-1]))


def _figures(house: House, asked: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds after the first."""
    measured = [row for row in house.rows if row["round_index"] >= 1]
    seconds = {
        stage: [row["work_seconds"] for row in measured if row["stage"] == stage]
        for stage in dict.fromkeys(row["stage"] for row in measured)
    }
    sampled = [row for row in measured if row["stage"] == "generate_rollouts"]
    updates = [row for row in measured if row["stage"] == "update_policy"]
    return {
        "rounds_measured": asked.rounds - 1,
        "seconds": {stage: median(found) for stage, found in seconds.items()},
        "rest_seconds": {
            kind: median([row["rest_seconds"] for row in measured if row["stage"] == stage])
            for kind, stage in (("trainer", "generate_rollouts"), ("generator", "score_rollouts"))
        },
        "generated_tokens_per_second": median([row["tokens"] / row["work_seconds"] for row in sampled]),
        "decode_share_of_roofline": median([row["least_seconds"] / row["work_seconds"] for row in sampled]),
        "update_flops_per_second": median([row["model_flops"] / row["work_seconds"] for row in updates]),
        "update_mfu": median([row["least_seconds"] / row["work_seconds"] for row in updates]),
    }


if __name__ == "__main__":
    sys.exit(main())
