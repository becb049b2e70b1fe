"""`python -m console`: what a person does with a store besides running: verify, gc, sign. Loads no engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from console.gc import collect
from console.sign import sign_store
from console.verify import verify_lineage
from stages.artifacts.errors import RatchetError
from stages.artifacts.room import room_for


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m console", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="re-hash a model and all that it was made from, back to the data")
    verify.add_argument("path", type=Path, help="an artifact, a path in one, or a run's `last` or `best`")
    gc = commands.add_parser("gc", help="free what the retention rule does not keep, and what dead attempts left")
    gc.add_argument("--store", type=Path, default=Path("outputs"))
    gc.add_argument("--snapshots", type=int, help="trainer states to keep per run, instead of its configuration's")
    gc.add_argument("--policies", type=int, help="policies to keep per run, beside the best one")
    gc.add_argument("--dry-run", action="store_true", help="say what would be freed, and free nothing")
    sign = commands.add_parser("sign", help="sign a store that came from elsewhere, and that you trust, with your key")
    sign.add_argument("--store", type=Path, required=True)
    asked = parser.parse_args(arguments)
    os.umask(0o077)
    try:
        if asked.command == "verify":
            return verify_lineage(asked.path, say=print)
        with room_for(asked.store):
            if asked.command == "gc":
                keep = {"snapshots": asked.snapshots, "policies": asked.policies}
                collect(asked.store, keep=keep, dry_run=asked.dry_run, say=print)
            else:
                sign_store(asked.store, say=print)
    except RatchetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
