"""Writes docs/artifacts.md from the schemas, so that the page cannot say anything else. Knows no stage.

`python -m stages.artifacts.document docs/artifacts.md` writes; with `--check` it compares and says what to do.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import sys
from pathlib import Path

import pyarrow as pa

from stages.artifacts import schemas

COMMAND = "make docs"

_HEAD = f"""\
# Artifacts: every Arrow file, column by column

Written by `{COMMAND}` from `stages/artifacts/schemas.py`; a test compares the two. Change the schema, not this page.

Each file is an Arrow *file* (not a stream) named `<kind>-NNNNN.arrow`, in bounded record batches, without
compression. It opens as it is with `datasets.Dataset.from_file`, Polars, pandas, and through pyarrow in DuckDB. No
column may be null. The metadata keys `ratchet.schema` and `ratchet.version` name kind and version; a reader refuses a
version that it does not know. Rows are joined by key, (`prompt_id`, `sample_index`), never by position.
"""


def page() -> str:
    """The whole page, as Markdown."""
    about = _docstrings()
    return "\n".join([_HEAD, *(_section(name, schema, about[name.upper()]) for name, schema in schemas.ALL.items())])


def _section(name: str, schema: pa.Schema, about: str) -> str:
    version = schema.metadata[b"ratchet.version"].decode()
    rows = [f"| `{field.name}` | `{_type(field.type)}` | {field.metadata[b'doc'].decode()} |" for field in schema]
    table = "\n".join(["| column | type | meaning |", "| --- | --- | --- |", *rows])
    return f"## {name}, version {version}\n\n{about}\n\n{table}\n"


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list<{kind.value_type}>"
    if pa.types.is_dictionary(kind):
        return f"dictionary<{kind.value_type}>"
    return str(kind)


def _docstrings() -> dict[str, str]:
    """The string that follows each constant of the schemas module, which Python itself does not keep."""
    body = ast.parse(inspect.getsource(schemas)).body
    found = {}
    for constant, text in itertools.pairwise(body):
        if (
            isinstance(constant, ast.Assign)
            and isinstance(constant.targets[0], ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[constant.targets[0].id] = str(text.value.value)
    return found


def main() -> None:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(prog="python -m stages.artifacts.document", description=main.__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if the page is out of date")
    arguments = parser.parse_args()
    if not arguments.check:
        arguments.path.write_text(page(), encoding="utf-8")
    elif not arguments.path.exists() or arguments.path.read_text(encoding="utf-8") != page():
        sys.exit(f"{arguments.path}: expected what the schemas say, found another text; run `{COMMAND}`")


if __name__ == "__main__":
    main()
