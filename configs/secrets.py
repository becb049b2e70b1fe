"""What counts as a secret, and text without any: for whatever is logged, shown or kept."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator

_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|KEY|APIKEY|PASS|PASSPHRASE|AUTH|CREDENTIALS?)(?:_|$)|_PWD$|PASSWORD|PASSWD", re.IGNORECASE
)
_NAMES_A_PLACE = re.compile(r"_(?:FILE|PATH|DIR|SOCK|ENV|ID|NAME|URL)$", re.IGNORECASE)
_IN_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s@'\"]*:(?P<password>[^/\s@'\"]+)@")
_SHORTEST = 8
"""A shorter value may well be a word, and taking it out of every text would hide more than it keeps."""
_SURELY_NO_WORD = 16


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret, by what such variables are called."""
    return _NAME.search(name) is not None and _NAMES_A_PLACE.search(name) is None


def secret_in(text: str) -> str:
    """What kind of secret a text holds, in words that do not repeat it; empty if none is seen."""
    for name, value in _secrets():
        if len(value) >= _SURELY_NO_WORD and value in text:
            return f"the value of the environment variable {name}"
    return "a URL with a password in it" if _IN_URL.search(text) else ""


def redact(text: str) -> str:
    """The text with each secret of the environment, and each password in a URL, replaced by a word that says so."""
    for name, value in _secrets():
        text = text.replace(value, f"[{name}]")
    return _IN_URL.sub(lambda found: f"{found['scheme']}[password]@", text)


def _secrets() -> Iterator[tuple[str, str]]:
    """(name, line) of each line of each secret in the environment: a private key has many."""
    for name, value in os.environ.items():
        if is_secret_name(name):
            yield from ((name, line.strip()) for line in value.splitlines() if len(line.strip()) >= _SHORTEST)


class RedactedStream(io.TextIOWrapper):
    """A text stream that takes secrets out of each line before it is written: for a worker's log.

    A line is written when it ends or at flush(); a secret that is printed in pieces is still seen whole.
    """

    def __init__(self, descriptor: int) -> None:
        below = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
        super().__init__(below, encoding="utf-8", errors="backslashreplace")
        self._line = ""

    def write(self, text: str) -> int:
        """Keep what has no end yet; write the lines that have."""
        whole, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            super().write(redact(whole) + newline)
            super().flush()
        return len(text)

    def flush(self) -> None:
        """Write what is kept, also without an end."""
        rest, self._line = self._line, ""
        if rest:
            super().write(redact(rest))
        super().flush()
