"""Whether this machine has what the configuration asks for. Asks the driver; opens no device."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

from configs.resources import Resources
from configs.schema import RunConfig
from stages.artifacts.errors import InputError

_DRIVER = Path("/proc/driver/nvidia/gpus")


def check_machine(resources: Resources) -> None:
    """Raise InputError, a line per part of the run whose GPUs are not there."""
    faults = []
    asked = {"trainer": resources.trainer.gpus, "generator": resources.generator.gpus}
    present = _gpus() if any(asked.values()) else None
    for part, gpus in asked.items():
        missing = [gpu for gpu in gpus if present is None or gpu >= present]
        if missing:
            found = "no NVIDIA driver" if present is None else f"{present}, numbered from 0"
            faults.append(
                f"resources.{part}.gpus: expected GPUs {list(gpus)}, found {found} on this machine; "
                "name those that are there, or none to run on CPU"
            )
    if faults:
        raise InputError("\n".join(faults))


def machine_warnings(config: RunConfig) -> list[str]:
    """What works, but not as was hoped."""
    cores = len(os.sched_getaffinity(0))
    trainer, generator = config.resources.trainer, config.resources.generator
    asked = {
        "trainer: ranks x threads": trainer.ranks * trainer.threads,
        "generator: engines x threads": generator.engines * generator.threads,
    }
    warnings = [
        f"resources.{what} is {threads}, this machine has {cores} cores: expect it to be slow"
        for what, threads in asked.items()
        if threads > cores
    ]
    rounds, engines = config.rounds, generator.engines
    if rounds.shards < engines:
        warnings.append(
            f"rounds.prompts_per_shard is {rounds.prompts_per_shard}: a round's {rounds.prompts_per_round} prompts "
            f"come in {rounds.shards}, too few for resources.generator.engines, {engines}; expected at most "
            f"{math.ceil(rounds.prompts_per_round / engines)}, or engines will have nothing to do"
        )
    return warnings


def _gpus() -> int | None:
    """How many GPUs the driver knows; None without a driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=5, check=True).stdout
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    except (OSError, subprocess.SubprocessError):
        return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else None
