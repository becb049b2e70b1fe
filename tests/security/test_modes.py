"""Modes: a store that others can change is refused, caches are one's own, and a process dumps no memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.artifacts.errors import InputError
from stages.artifacts.private import private_directory, require_own_store


@pytest.mark.parametrize(("inside", "mode"), [(".", 0o775), (".", 0o777), ("artifacts", 0o1777), ("runs", 0o720)])
def test_s09_a_store_that_others_can_write_to_is_refused(tmp_path: Path, inside: str, mode: int) -> None:
    path = tmp_path / inside
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    with pytest.raises(InputError) as refused:
        require_own_store(tmp_path)
    assert f"found mode {mode:04o}" in str(refused.value) and f"chmod go-w {path}" in str(refused.value)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_s09_a_store_of_ones_own_is_taken(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    (tmp_path / "runs").mkdir()
    require_own_store(tmp_path)


def test_s09_a_cache_is_made_private_and_one_of_another_user_refused(tmp_path: Path) -> None:
    loose = tmp_path / "cache"
    loose.mkdir(mode=0o755)
    assert private_directory(loose).stat().st_mode & 0o777 == 0o700
    assert private_directory(tmp_path / "deep" / "cache").stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        os.chown(loose, 12345, 12345)
        with pytest.raises(InputError, match="found one of user 12345; set XDG_CACHE_HOME"):
            private_directory(loose)


def test_s09_a_private_process_makes_private_files_and_no_core(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, resource, sys\n"
        "os.umask(0)\n"
        "from stages.artifacts.private import keep_files_private\n"
        "keep_files_private()\n"
        "pathlib.Path(sys.argv[1], 'd').mkdir(); pathlib.Path(sys.argv[1], 'd', 'f').touch()\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "0\n"
    modes = [f"{path.stat().st_mode & 0o7777:04o}" for path in (tmp_path / "d", tmp_path / "d" / "f")]
    assert modes == ["0700", "0600"]
