"""Finding and digesting a user's reward function without running it. Light: no torch, no import of user code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from stages.artifacts.durable import canonical_json, digest_bytes
from stages.artifacts.errors import InputError


def code_digest(function: str) -> str:
    """sha256 of the code of `module:function`: its module and every module that it imports from the same root.

    Comments, docstrings and layout do not count, every other edit does. The root is the entry of the working
    directory and sys.path under which the module lies; installed packages are not followed. No module is
    executed. Raises InputError if the module or the function in it cannot be found.
    """
    module, _, name = function.partition(":")
    path, root = _find(module, function=function)
    tree = _parse(path)
    if name not in _top_level_names(tree):
        raise InputError(f"reward function {function!r}: expected {name!r} at the top level of {path}, found none")
    digests: dict[str, str] = {}
    waiting = [(module, path, tree)]
    while waiting:
        module, path, tree = waiting.pop()
        digests[module] = digest_bytes(ast.dump(_without_docstrings(tree)).encode())
        for imported in _imports(tree, module=module, is_package=path.name == "__init__.py"):
            origin = _origin(imported, [root])
            if imported not in digests and origin is not None and "site-packages" not in origin.parts:
                waiting.append((imported, origin, _parse(origin)))
    return digest_bytes(canonical_json(digests))


def _find(module: str, *, function: str) -> tuple[Path, str]:
    roots = [str(Path.cwd()), *(entry or str(Path.cwd()) for entry in sys.path)]
    for root in roots:
        origin = _origin(module, [root])
        if origin is not None:
            return origin, root
    raise InputError(
        f"reward function {function!r}: no module {module!r} found as Python source; looked in {Path.cwd()} and "
        f"sys.path. Run from the directory that holds it, or add that to PYTHONPATH"
    )


def _origin(module: str, roots: list[str]) -> Path | None:
    """The source file of a dotted module, found part by part, so that no parent package is imported."""
    spec: ModuleSpec | None = None
    search = roots
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{path}: expected Python source, found {error}") from None


def _top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names.update(target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
            case _:
                pass
    return names


def _imports(tree: ast.Module, *, module: str, is_package: bool) -> Iterator[str]:
    """Dotted names that the module may import, relative ones made absolute; some of them are no modules."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                kept = ".".join(parents[: len(parents) - node.level + 1])
                base = f"{kept}.{base}".strip(".")
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body[:1]:
                case [ast.Expr(value=ast.Constant(value=str()))]:
                    node.body = node.body[1:]
    return tree
