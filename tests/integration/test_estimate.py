"""The disk estimate against what a run really wrote."""

from __future__ import annotations

from pathlib import Path

from configs.load import load_config
from flows.estimate import estimate_run
from tests.integration.pipelines import ROOT, TINY_GRPO


def test_the_estimate_is_within_a_factor_of_two(tiny_store: Path) -> None:
    estimate = estimate_run(load_config(ROOT / TINY_GRPO), done=frozenset())
    written = sum(path.stat().st_size for path in (tiny_store / "artifacts").rglob("*") if path.is_file())
    assert estimate is not None
    print(f"R07: estimated {estimate.total} bytes, written {written}: a factor of {estimate.total / written:.2f}")
    assert 0.5 < estimate.total / written < 2.0
