"""R03, each trial alone: a run dies before its n-th durable operation and goes on. `make torture` does every n.

Results are kept in `$RATCHET_TORTURE_OUT`, so that a campaign that was stopped goes on with the operations it lacks;
`$RATCHET_TORTURE_MINUTES` spreads what can be done in that time evenly over them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import layout
from tests.fault.equality import differences, litter
from tests.fault.hook import Operation, Plan
from tests.fault.trials import TORTURE, Nursery, Reference, prefix, rng, spread

pytestmark = pytest.mark.timeout(0)
SAMPLE = 3


def committed(operations: Sequence[Operation]) -> list[tuple[int, str]]:
    """Where in the operations each artifact was committed, and its place in the store."""
    found = []
    for index, operation in enumerate(operations):
        kind, _, where = operation.name.partition(" ")
        if kind == "rename" and where.startswith("artifacts/") and where.count("/") == 2:
            found.append((index, where))
    return found


def plan_for(reference: Reference, index: int) -> tuple[Plan, int]:
    """How to die before that operation, and where the store's prefix ends: before the artifact it belongs to."""
    operations, chosen = reference.operations, reference.operations[index]
    where = chosen.name.partition(" ")[2]
    commits = [(-1, ""), *((at, place) for at, place in committed(operations) if at < index)]
    follows = [i for i, (_, place) in enumerate(commits) if i and where in _after_a_commit(place)]
    commits = commits[: follows[-1] + 1] if follows else commits  # another may have come in between
    at = commits[-1][0]
    released = [at for at, place in commits[1:] if where.startswith(place) and _is_released(reference, place)]
    if released:  # the reference no longer has what was deleted from it: it is made again first
        before = since = released[0]
    elif follows:
        before, since = at, commits[-2][0] + 1
    else:
        before, since = index, at + 1
    first = 0 if where.startswith("runs/") else since
    nth = sum(o.name == chosen.name and o.by == chosen.by for o in operations[first : index + 1])
    return Plan(chosen.name, nth=nth), before


def _after_a_commit(place: str) -> tuple[str, str]:
    """Where the operations lie that follow an artifact's commit."""
    return place.rpartition("/")[0], place.replace("artifacts/", "attempts/")


def _is_released(reference: Reference, place: str) -> bool:
    return (reference.store / place / layout.RELEASED).exists()


def trial(nursery: Nursery, reference: Reference, index: int, store: Path) -> dict[str, Any]:
    """Die before one operation, go on, and stop when the next artifact but one is there. What came of it."""
    plan, before = plan_for(reference, index)
    started = time.monotonic()
    prefix(reference, store, before=before)
    died = nursery.run(reference.case, store, plan)
    wrong = [] if died.code == -9 else [f"expected a death, found exit code {died.code}"]
    later = [where for at, where in committed(reference.operations) if at >= before]
    later = [where for where in later if not (store / where / layout.MANIFEST).exists()][:2]
    again = nursery.start(reference.case, store)
    if len(later) == 2:  # a snapshot and the next round's rollouts are made at the same time: wait for both
        while not again.is_over and not all((store / where / layout.MANIFEST).exists() for where in later):
            time.sleep(0.02)
        code = again.kill().code if not again.is_over else again.wait().code
        wrong += differences(reference.store, store, partial=True)
        wrong += [f"left over: {p}" for p in litter(store) if p.startswith(later[0].replace("artifacts", "attempts"))]
        missing = [where for where in later if not (store / where / layout.MANIFEST).exists()]
        wrong += [f"exit code {code}, without {missing}: {again.out[-2000:]}"] if missing else []
    else:
        code = again.wait().code
        wrong += [f"left over: {path}" for path in litter(store)]
        wrong += differences(reference.store, store) if code == 0 else [f"exit code {code}: {again.out[-2000:]}"]
    shutil.rmtree(store)
    seconds = round(time.monotonic() - started, 2)
    return {"case": reference.case.name, "index": index, "name": plan.operation, "seconds": seconds, "wrong": wrong}


def test_r03_each_durable_operation_alone(
    nursery: Nursery, references: Mapping[str, Reference], tmp_path: Path
) -> None:
    record = Path(os.environ.get("RATCHET_TORTURE_OUT", tmp_path)) / "operations.jsonl"
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    seen = {(row["case"], row["index"], row["name"]) for row in done}
    every = [(name, i, o.name) for name, r in references.items() for i, o in enumerate(r.operations)]
    todo = [row for row in every if row not in seen]
    rng("R03", len(todo)).shuffle(todo)
    deadline = time.monotonic() + 60.0 * float(os.environ.get("RATCHET_TORTURE_MINUTES", "inf"))
    todo = todo if TORTURE else spread(todo, SAMPLE)
    started = time.monotonic()

    def one(row: tuple[str, int, str]) -> dict[str, Any] | None:
        if time.monotonic() > deadline:
            return None
        result = trial(nursery, references[row[0]], row[1], tmp_path / f"{row[0]}-{row[1]}")
        with record.open("a") as file:
            file.write(json.dumps(result) + "\n")
        return result

    with ThreadPoolExecutor(2) as threads:
        done += [result for result in threads.map(one, todo) if result is not None]
    wrong = [row for row in done if row["wrong"]]
    print(
        f"R03: died before each of {len(done)} of {len(every)} durable operations, {len(done) - len(wrong)} same; "
        f"{time.monotonic() - started:.0f} s"
    )
    assert wrong == []
