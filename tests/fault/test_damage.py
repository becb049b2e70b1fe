"""R08: files that change at rest are noticed at the next use, put aside with a reason, and made again the same."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stages.artifacts import layout
from stages.artifacts.errors import DamagedArtifact
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.store import verify
from tests.fault.campaign import compared
from tests.fault.trials import Nursery, Reference, rng, trials

pytestmark = pytest.mark.timeout(0)
SEED = 8
Damage = Callable[[Path, random.Random], None]


def _cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def _rewritten(path: Path, data: bytes) -> None:
    """In place, with the old modification time: as a bad disk would."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    _rewritten(path, bytes(data))


def _zero_page(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    page = draw.randrange((len(data) + 4095) // 4096) * 4096
    length = len(data[page : page + 4096])
    if not any(data[page : page + 4096]):
        data[page] = 1
    else:
        data[page : page + 4096] = bytes(length)
    _rewritten(path, bytes(data))


def _swap(path: Path, draw: random.Random) -> None:
    others = [p for p in sorted(path.parent.iterdir()) if p.is_file() and p.read_bytes() != path.read_bytes()]
    other = draw.choice(others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def _stale(path: Path, draw: random.Random) -> None:
    """The file of the same name from another artifact of the stage, or of none."""
    root = next(p for p in path.parents if (p / layout.MANIFEST).exists())
    others = [p / path.relative_to(root) for p in sorted(root.parent.iterdir()) if p != root]
    found = [p for p in others if p.exists() and p.read_bytes() != path.read_bytes()]
    path.write_bytes(draw.choice(found).read_bytes() if found else path.read_bytes() + b"besides")


def _extra(path: Path, draw: random.Random) -> None:
    path.with_name(f"{path.name}.{draw.randrange(100)}").write_bytes(b"besides")


def _link(path: Path, draw: random.Random) -> None:
    """The same bytes, but not in the artifact."""
    root = next(p for p in path.parents if p.name == "artifacts").parent
    kept = root / f"elsewhere-{draw.randrange(10**9)}"
    path.rename(kept)
    path.symlink_to(kept)


DAMAGES: Mapping[str, Damage] = {
    function.__name__.strip("_"): function
    for function in (_cut, _flip, _zero_page, _swap, _delete, _stale, _extra, _link)
}
KINDS = (".arrow", ".safetensors", ".pt", layout.MANIFEST, ".json")


def kind_of(path: Path) -> str:
    """Which kind of file it is."""
    return layout.MANIFEST if path.name == layout.MANIFEST else path.suffix


def victims(store: Path) -> Mapping[str, list[Path]]:
    """The files of a store's artifacts, by kind."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted((store / "artifacts").rglob("*")):
        if path.is_file() and kind_of(path) in found and path.stat().st_size and path.name != layout.RELEASED:
            found[kind_of(path)].append(path)
    return found


def possible(path: Path) -> list[str]:
    """What can be done to a file. A manifest with the same bytes elsewhere says the same: it is signed."""
    alone = sum(p.is_file() for p in path.parent.iterdir()) < 3
    besides = {"swap"} if alone else set()
    return sorted(set(DAMAGES) - besides - ({"link"} if path.name == layout.MANIFEST else set()))


def copied(source: Path, target: Path) -> Path:
    """A copy of a store that shares no file with it, so that it can be damaged in place."""
    shutil.copytree(source, target, symlinks=True)
    return target


def test_r08_damage_at_rest_is_noticed_at_the_next_use(
    references: Mapping[str, Reference], nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_KEY_FILE", nursery.environment["RATCHET_KEY_FILE"])
    started, count, missed = time.monotonic(), trials(200, full=1000), []
    store = copied(references["ppo"].store, tmp_path / "store")
    by_kind, tally = victims(store), Counter[str]()
    assert all(by_kind.values()), {kind: len(paths) for kind, paths in by_kind.items()}
    for number in range(count):
        draw = rng(SEED, number)
        kind = KINDS[number % len(KINDS)]
        path = draw.choice(by_kind[kind])
        root = next(p for p in path.parents if (p / layout.MANIFEST).exists())
        ref = ArtifactRef(stage=root.parent.name, fingerprint=root.name)
        if number % 2:
            assert verify(store, ref) is not None, "seen whole before, in this process"
        shutil.copytree(root, tmp_path / "kept", symlinks=True)
        name = draw.choice(possible(path))
        DAMAGES[name](path, draw)
        try:
            verify(store, ref)
            missed.append(f"{name} {path}")
        except DamagedArtifact as error:
            where, _, reason = str(error).removeprefix(f"damaged artifact {ref}: ").partition(": ")
            assert where.startswith(str(root)) and reason, error
            tally[name] += 1
        shutil.rmtree(root)
        (tmp_path / "kept").rename(root)
    print(
        f"R08: {count - len(missed)} of {count} damaged artifacts noticed, with file and reason; "
        f"{time.monotonic() - started:.0f} s; {dict(sorted(tally.items()))}"
    )
    assert missed == []


def test_r08_what_was_damaged_is_put_aside_and_made_again_the_same(
    references: Mapping[str, Reference], nursery: Nursery, tmp_path: Path
) -> None:
    started, count = time.monotonic(), trials(3, full=50)
    for number in range(count):
        reference, draw = list(references.values())[number % 2], rng(SEED, "rebuild", number)
        store = copied(reference.store, tmp_path / f"{number}")
        kind = KINDS[number % len(KINDS)]
        path = draw.choice(victims(store)[kind])
        name = draw.choice([n for n in DAMAGES if n not in ("swap", "link")])
        DAMAGES[name](path, draw)
        ended = nursery.finish(reference.case, store)
        (line,) = [line for line in ended.out.splitlines() if line.startswith("damaged artifact ")]
        kept = Path(line.partition("; moved to ")[2].partition("; ")[0])
        assert kept.is_dir() and kept.is_relative_to(store / "quarantine"), line
        assert compared(reference, store) == [], f"{name} {path}"
    print(
        f"R08: {count} of {count} damaged artifacts put aside and made again the same; "
        f"{time.monotonic() - started:.0f} s"
    )


@pytest.mark.parametrize("document", ["config.json", "jobs/train_sft.json", "summary.json", "metrics-00000.arrow"])
def test_r08_a_damaged_document_of_the_run_is_written_anew(
    references: Mapping[str, Reference], nursery: Nursery, tmp_path: Path, document: str
) -> None:
    reference = references["grpo"]
    store = copied(reference.store, tmp_path / "store")
    (run,) = (store / "runs").iterdir()
    _cut(run / document, rng(SEED, document))
    nursery.finish(reference.case, store)
    assert compared(reference, store) == []
