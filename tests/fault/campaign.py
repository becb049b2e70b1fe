"""Chains of deaths: one run, killed again and again until it ends, and what it then differs in from the reference."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fault.equality import differences, litter
from tests.fault.hook import Operation, Plan
from tests.fault.trials import Ended, Nursery, Reference

_ATTEMPT = re.compile(r"^mkdir attempts/([a-z_]+)/[0-9a-f]+/#$")
Aim = Callable[["Progress"], tuple[Plan, ...]]


@dataclass
class Progress:
    """How far a chain is.

    position: index of the furthest of the reference's operations that has been made. before: deaths by stage in
    earlier chains, hits: in this one.
    """

    reference: Reference
    left: int
    before: Counter[str]
    position: int = -1
    hits: Counter[str] = field(default_factory=Counter)

    @property
    def window(self) -> Sequence[Operation]:
        """The operations that the next death should choose from, so that the deaths are spread over the run."""
        rest = self.reference.operations[self.position + 1 :]
        return rest[: max(1, len(rest) // max(1, self.left))] or self.reference.operations[-1:]

    def made(self, ended: Ended) -> None:
        """Note how far a start came."""
        index: dict[str, int] = {}
        for number, operation in enumerate(self.reference.operations):
            index.setdefault(operation.name, number)
        reached = [index.get(operation.name, -1) for operation in ended.operations()]
        self.position = max([self.position, *reached])
        self.hits.update(ended.deaths)


@dataclass(frozen=True)
class Chain:
    """What a chain of deaths came to."""

    starts: Sequence[Ended]
    hits: Counter[str]
    different: Sequence[str]

    @property
    def deaths(self) -> int:
        """How many of the planned deaths came about."""
        return sum(self.hits.values())

    @property
    def seconds(self) -> float:
        """Wall time of all its starts."""
        return sum(start.seconds for start in self.starts)

    def lost_stages(self) -> int:
        """Attempts that came to nothing: begun beyond one per artifact."""
        begun = Counter(o.name for start in self.starts for o in start.operations() if _ATTEMPT.match(o.name))
        return sum(begun.values()) - len(begun)

    def made_stages(self) -> int:
        """Artifacts that were made."""
        return len({o.name for start in self.starts for o in start.operations() if _ATTEMPT.match(o.name)})


def chain(
    nursery: Nursery, reference: Reference, store: Path, aim: Aim, *, deaths: int, before: Counter[str] | None = None
) -> Chain:
    """Start a run until it has died `deaths` times or has ended; the last start is not disturbed."""
    progress = Progress(reference, left=deaths, before=before or Counter())
    starts = []
    while progress.left > 0:
        ended = nursery.run(reference.case, store, *aim(progress))
        starts.append(ended)
        assert ended.code in (0, -9), f"exit code {ended.code}\n{ended.out}"
        progress.made(ended)
        progress.left = deaths - sum(progress.hits.values())
        if ended.code == 0:
            break
    starts.append(nursery.finish(reference.case, store))
    return Chain(starts, progress.hits, compared(reference, store))


def compared(reference: Reference, store: Path) -> list[str]:
    """What is wrong with a store that should equal the reference's."""
    return differences(reference.store, store) + [f"left over: {path}" for path in litter(store)]


def aim_at_operations(rng: random.Random) -> Aim:
    """Die just before an operation: of all that are left in the window, of the kind and stage hit least so far."""
    seen: Counter[tuple[str, str, str]] = Counter()

    def aim(progress: Progress) -> tuple[Plan, ...]:
        chosen = min(progress.window, key=lambda o: (seen[o.by, o.stage, o.kind], rng.random()))
        seen[chosen.by, chosen.stage, chosen.kind] += 1
        return (Plan(chosen.name, victim=rng.choice(("everyone", "everyone", "launcher"))),)

    return aim


def aim_at_random(rng: random.Random) -> Aim:
    """Die at a random moment: in turn from the start on, or a moment after some attempt in the window has begun.

    Every third time a worker dies first, and the launcher goes on with another.
    """
    turn = 0

    def aim(progress: Progress) -> tuple[Plan, ...]:
        nonlocal turn
        turn += 1
        victim = rng.choice(("everyone", "launcher"))
        if turn % 3 == 0:
            return (Plan("any", seconds=rng.uniform(0.05, 3.0), victim=victim),)
        begun = [o for o in progress.window if _ATTEMPT.match(o.name)] or list(progress.window)
        chosen = min(begun, key=lambda o: (progress.before[o.stage] + progress.hits[o.stage], rng.random()))
        if turn % 3 == 1:  # some stages take a tenth of a second, some a few milliseconds
            soon = rng.choice((0.15, 0.02, 0.002))
            return (Plan(chosen.name, seconds=rng.uniform(0.0, soon), victim=victim),)
        lost = Plan(chosen.name, seconds=rng.uniform(0.0, rng.choice((0.3, 0.02))), victim="worker")
        return (lost, Plan(chosen.name, nth=2, seconds=rng.uniform(0.0, 2.5), victim=victim))

    return aim


def aim_at_stages(rng: random.Random, stages: Collection[str]) -> Aim:
    """Die at a random moment of one of these stages, however far ahead it is; they may take a few milliseconds."""

    def aim(progress: Progress) -> tuple[Plan, ...]:
        operations = progress.reference.operations
        named = {o.name for o in operations[progress.position + 1 :]}
        begun = [o for o in operations if o.stage in stages and _commit_of(o.name) in named]
        chosen = min(begun or operations[-1:], key=lambda o: (progress.hits[o.stage], rng.random()))
        victim = rng.choice(("everyone", "launcher"))
        return (Plan(chosen.name, seconds=rng.uniform(0.0, rng.choice((0.05, 0.01, 0.002))), victim=victim),)

    return aim


def _commit_of(name: str) -> str:
    """The operation that commits what an attempt is begun for; nothing for other operations."""
    found = re.match(r"^mkdir attempts/([a-z_]+/[0-9a-f]+)/#$", name)
    return f"rename artifacts/{found[1]}" if found else ""


def aim_at_intervals(rng: random.Random, *, shortest: float, longest: float) -> Aim:
    """A storm: die so many seconds after each start, during recovery as well."""
    return lambda progress: (Plan("any", seconds=rng.uniform(shortest, longest), victim="everyone"),)
