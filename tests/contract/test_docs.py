"""What is written is true: generated pages are current, links lead somewhere, and no machine's paths are named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stages.artifacts import document, layout, schemas

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".md", ".py", ".yaml", ".yml", ".toml", ".txt", ".json", ".cfg", ".ini", ".sh", ""}
# Written in two pieces, so that this file does not name them itself.
MACHINE_PATHS = re.compile(
    "|".join(["/" + "work/", "/" + "tmp/env", r"\." + "library", "/" + "root/", "/" + r"home/\w+/", "/" + "Users/"])
)
LINK = re.compile(r"\[[^\]]+\]\((?!https?:|#|mailto:)([^)#\s]+)")


def committed() -> list[Path]:
    """Files that git tracks or would track."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_artifacts_page_is_current() -> None:
    page = (ROOT / "docs" / "artifacts.md").read_text(encoding="utf-8")
    assert page == document.page(), f"docs/artifacts.md is out of date; run `{document.COMMAND}`"


def test_artifacts_page_names_every_column() -> None:
    page = document.page()
    for name, schema in schemas.ALL.items():
        assert f"## {name}, version " in page
        for field in schema:
            assert f"| `{field.name}` |" in page
            assert field.metadata[b"doc"], f"{name}.{field.name} has no line of its own"


def test_the_page_can_be_written_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "artifacts.md"
    monkeypatch.setattr(sys, "argv", ["document", str(path), "--check"])
    with pytest.raises(SystemExit, match=r"found another text; run `make docs`"):
        document.main()
    monkeypatch.setattr(sys, "argv", ["document", str(path)])
    document.main()
    monkeypatch.setattr(sys, "argv", ["document", str(path), "--check"])
    document.main()


def test_no_committed_text_names_a_path_of_some_machine() -> None:
    found = []
    for path in committed():
        if path.suffix in TEXT:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if MACHINE_PATHS.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_requirements_name_no_index() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        pins = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+]+", line) for line in pins), path.name


def test_requirements_agree() -> None:
    pins = {}
    for name in ("cpu", "cuda", "dev"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        pins[name] = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    differ_on_cuda = {"torch", "triton", "apache-tvm-ffi"}
    for one, other in (("cpu", "cuda"), ("cpu", "dev"), ("cuda", "dev")):
        for package in (pins[one].keys() & pins[other].keys()) - differ_on_cuda:
            assert pins[one][package] == pins[other][package], f"{package} in {one}.txt and {other}.txt"


@pytest.mark.parametrize("page", sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing


def test_the_architecture_names_every_stage_and_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for job in sorted((ROOT / "stages").glob("*/job.py")):
        assert f"| {job.parent.name} |" in text
    for room in ("engines", "models", "rewards", "rl", "artifacts"):
        assert f"`stages/{room}/`" in text
    store = Path("outputs")
    for path in (
        layout.artifact(store, "s", "f"),
        layout.attempts(store, "s", "f"),
        layout.quarantine(store, "s", "f"),
        layout.lock(store, "s", "f"),
        layout.run_directory(store, "r"),
    ):
        assert f"  {path.parts[1]}/" in text


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
    for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"):
        assert path.read_text(encoding="utf-8").startswith(f"# {int(path.name[:4])}. ")
