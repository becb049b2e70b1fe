"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path


def machine() -> dict[str, str | int | float]:
    """Processor, cores, memory, Python, date, and how busy the machine was."""
    names = (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((n for line, n in zip(lines, names, strict=True) if line.startswith("model name")), platform.machine())
    return {
        "processor": model,
        "cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load_1_minute": round(os.getloadavg()[0], 2),
    }
