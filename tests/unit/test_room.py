"""However a library says that the disk is full, the sentence is the same; other errors stay what they are."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from stages.artifacts.durable import write_bytes
from stages.artifacts.errors import GateError, StoreFull
from stages.artifacts.room import room_for
from stages.artifacts.schemas import METRICS
from stages.artifacts.shards import write_table

FULL = Path("/dev/full")
LIMIT = 4096


def _plain(path: Path) -> None:
    with path.open("wb") as file:
        file.write(bytes(100_000))


def _arrow(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink:
        sink.write(bytes(100_000))


def _caught(path: Path) -> None:
    """As a library may: its own error, with the cause behind it."""
    try:
        _plain(path)
    except OSError as error:
        raise ValueError("could not save") from error


WRITERS: dict[str, Callable[[Path], None]] = {
    "open": _plain,
    "pyarrow": _arrow,
    "torch": lambda path: torch.save({"weights": torch.zeros(50_000)}, path),
    "safetensors": lambda path: save_file({"weights": torch.zeros(50_000)}, path),
    "a cause": _caught,
}


@contextmanager
def small_files() -> Iterator[None]:
    """No file over LIMIT bytes may be written. Not for longer than needed: pytest's own output may be one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("writer", sorted(set(WRITERS) - {"safetensors"}))
def test_a_full_disk_is_named_whoever_met_it(writer: str, tmp_path: Path) -> None:
    with pytest.raises(StoreFull) as caught, room_for(tmp_path):
        WRITERS[writer](FULL)
    message = str(caught.value)
    assert "expected room to write, found " in message and " bytes and " in message and " files free there" in message
    assert message.endswith("then run the same command again: what was finished is kept")
    assert caught.value.exit_code == 74


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_a_file_over_the_limit_is_named_with_the_limit(writer: str, tmp_path: Path) -> None:
    over = rf"no file over {LIMIT} bytes \(ulimit -f\)"
    with pytest.raises(StoreFull, match=over), small_files(), room_for(tmp_path):
        WRITERS[writer](tmp_path / "file")


def test_the_bytes_needed_are_named_where_they_are_known(tmp_path: Path) -> None:
    with (
        small_files(),
        pytest.raises(StoreFull, match=r"expected room for 100000 bytes, found \d+ bytes and \d+ files"),
    ):
        write_bytes(tmp_path / "file", bytes(100_000))
    assert not (tmp_path / "file").exists()
    rows = [{"round_index": 0, "stage": "s" * 900, "step": n, "metric": "m", "value": 0.0} for n in range(100)]
    with small_files(), pytest.raises(StoreFull, match=r"rows-00000\.arrow: expected room"):
        write_table(tmp_path / "rows-00000.arrow", rows, METRICS)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EACCES, "no"), RuntimeError("expected pos"), GateError("No space left on device"), KeyError(28)],
)
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, room_for(tmp_path):
        raise error
    assert caught.value is error
