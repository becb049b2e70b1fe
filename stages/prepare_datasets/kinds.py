"""What a file really is, by its first bytes, and its content unpacked within bounds. Knows nothing of rows."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO

from stages.artifacts.errors import InputError
from stages.prepare_datasets.files import suffix_kind

MAX_UNPACKED_BYTES = 8 * 2**30
MAX_RATIO = 100
RATIO_GRACE_BYTES = 32 * 2**20

_MAGIC = [
    (b"PAR1", "Parquet"),
    (b"ARROW1", "Arrow"),
    (b"\xff\xff\xff\xff", "Arrow"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "a zip archive"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"%PDF", "a PDF"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3", "an SQLite database"),
    (b"version https://git-lfs", "a git-LFS pointer"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
]
_ADVICE = {
    "a git-LFS pointer": "fetch the real file with `git lfs pull`",
    "an HTML page": "download the file itself, not the page that shows it",
    "UTF-16 text": "convert it, for example with `iconv -f UTF-16 -t UTF-8`",
    "a zip archive": "unpack it first",
    "gzip": "name it .gz, or unpack it",
}
_HEAD_BYTES = 4096


def tell_kind(path: Path) -> str:
    """JSON Lines, JSON, CSV, Parquet or Arrow. Raises InputError where name and content disagree, naming both."""
    promised, packed = suffix_kind(path)
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not head:
        raise InputError(f"{path}: expected rows, found an empty file")
    if packed:
        if not head.startswith(b"\x1f\x8b"):
            raise InputError(f"{path}: expected gzip, as its name says, found {_seen(head) or 'other content'}")
        if promised in ("Parquet", "Arrow"):
            raise InputError(f"{path}: expected {promised} as it is, found it gzipped; unpack it (gunzip) first")
        with open_unpacked(path) as stream:
            head = stream.read(_HEAD_BYTES)
    seen = _seen(head)
    if promised is None and seen in ("Parquet", "Arrow", "JSON", "JSON Lines"):
        return seen
    if promised is not None and (
        seen == promised
        or (promised == "JSON" and seen == "JSON Lines")
        or (promised in ("CSV", "JSON", "JSON Lines") and seen is None)
    ):
        return promised
    advice = _ADVICE.get(str(seen), "give it the right name, or the right content")
    expected = promised or "JSON Lines, JSON, CSV, Parquet or Arrow"
    raise InputError(f"{path}: expected {expected}, found {seen or 'content of no known kind'}; {advice}")


def open_unpacked(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked if it is gzip, never more than the stated bounds. Reads raise InputError."""
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(_BoundedGzip(path), 2**16)
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


class _BoundedGzip(io.RawIOBase):
    """Gunzips, and refuses what unpacks to absurdly much or is cut or damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed_bytes = path.stat().st_size
        self._file = gzip.GzipFile(path, "rb")
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._file.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"{self._path}: expected a whole gzip file, found it cut or damaged after {self._bytes} bytes of "
                f"content ({error}); fetch it again"
            ) from None
        self._bytes += len(data)
        allowed = min(MAX_UNPACKED_BYTES, max(RATIO_GRACE_BYTES, MAX_RATIO * self._packed_bytes))
        if self._bytes > allowed:
            raise InputError(
                f"{self._path}: expected at most {allowed} bytes inside {self._packed_bytes} bytes of gzip, found "
                "more: it looks like a gzip bomb; unpack it yourself if it is genuine"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _seen(head: bytes) -> str | None:
    """What the first bytes are; None for text that could be CSV or a broken JSON file."""
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] == b"<" and any(tag in text[:512].lower() for tag in (b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "an HTML page"
    if len(head) >= 8 and (head[1:40:2].count(0) > 8 or head[0:40:2].count(0) > 8):
        return "UTF-16 text"
    if text.startswith(b"{"):
        return "JSON Lines"
    if text.startswith(b"["):
        return "JSON"
    return None
