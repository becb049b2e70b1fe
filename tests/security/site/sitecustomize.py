"""Notes what a process does that could run foreign code or reach the network: one JSON line per new thing, per pid.

On PYTHONPATH for the audited run alone. Imports nothing but the standard library, and nothing of this house.
"""

import json
import os
import sys

_FOLDER = os.environ.get("RATCHET_TEST_AUDIT", "")
_EVENTS = {
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
}
_seen = set()
_busy = False


def _plain(value):
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (bytes, os.PathLike)):
        return os.fsdecode(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return type(value).__name__


def _callers():
    """The nearest files outside pickle and this one: who asked."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 6:
        name = "/".join(frame.f_code.co_filename.rsplit("/", 3)[-3:])
        if not name.endswith(("pickle.py", "site/sitecustomize.py")) and name not in found:
            found.append(name)
        frame = frame.f_back
    return found


def _note(event, arguments):
    global _busy
    if event not in _EVENTS or _busy:
        return
    _busy = True
    try:
        if event.startswith("socket."):
            what = [str(getattr(item, "family", _plain(item))) for item in arguments[:1]] + _plain(arguments[1:2])
        else:
            what = _plain(arguments[:2])
        key = json.dumps([event, what])
        if key not in _seen:
            _seen.add(key)
            line = json.dumps({"event": event, "what": what, "argv": sys.orig_argv[:6], "callers": _callers()})
            descriptor = os.open(f"{_FOLDER}/{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)
    finally:
        _busy = False


if _FOLDER:
    os.close(os.open(f"{_FOLDER}/{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    sys.addaudithook(_note)
