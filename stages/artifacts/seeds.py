"""Seeds by coordinates, never by history: a lost random state cannot matter."""

from __future__ import annotations

import random
import sys

from stages.artifacts.durable import canonical_json, digest_bytes


def seed_at(run_seed: int, *coordinates: str | int) -> int:
    """A 63-bit seed for one place of a run, such as ("update_policy", round_index, epoch)."""
    return int(digest_bytes(canonical_json([run_seed, *coordinates]))[:16], 16) >> 1


def seed_libraries(seed: int) -> None:
    """Have whatever draws numbers in this process begin at `seed`; torch too, where it is loaded."""
    random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
