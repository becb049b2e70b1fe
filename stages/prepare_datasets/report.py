"""What the data report says: rows read, kept and dropped with the first place of each reason, lengths in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PERCENTILES = (5, 50, 95, 99)


class Tally:
    """Counts of one role. A drop without a reason cannot be written down."""

    def __init__(self) -> None:
        self.read = 0
        self.kept = 0
        self._dropped: dict[str, dict[str, Any]] = {}

    def drop(self, reason: str, place: str, *, rows: int = 1) -> None:
        """Count dropped rows. place: of the first of them."""
        entry = self._dropped.setdefault(reason, {"rows": 0, "first": place})
        entry["rows"] += rows

    @property
    def dropped(self) -> int:
        """Rows dropped, for whatever reason."""
        return sum(int(entry["rows"]) for entry in self._dropped.values())

    def reasons(self) -> str:
        """One line for a message: reason, count and first place of each."""
        parts = [f"{e['rows']} {reason} (first: {e['first']})" for reason, e in self._dropped.items()]
        return "; ".join(parts) or "no reason"

    def document(self) -> dict[str, Any]:
        """The role's counts for report.json."""
        return {"rows_read": self.read, "rows_kept": self.kept, "rows_dropped": self._dropped}


def lengths(counts: Sequence[int]) -> dict[str, int]:
    """p5, p50, p95, p99 (nearest rank) and max of lengths in tokens; empty for no rows."""
    ordered = sorted(counts)
    if not ordered:
        return {}
    found = {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES}
    return found | {"max": ordered[-1]}


def role_report(tally: Tally, tokens: Mapping[str, Sequence[int]], splits: Mapping[str, int]) -> dict[str, Any]:
    """One role's part of report.json. tokens: lengths of all kept rows, by column. splits: rows by part."""
    return {
        **tally.document(),
        "splits": dict(splits),
        "tokens": {name: lengths(counts) for name, counts in tokens.items()},
    }
