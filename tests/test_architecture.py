"""``docs/architecture.md`` names what is there: its references, and its table of imports.

``python -m tests.test_architecture`` rewrites that table.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_imports import COMMON, MAY_IMPORT, PACKAGE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
REFERENCES = sorted(
    found
    for found in {
        " ".join(x.split()) for x in re.findall(r"`([\w/]+\.py(?::\s[\w.]+)?)`", PAGE.read_text(encoding="utf-8"))
    }
    if not found.startswith(("file.py", "tests/"))
)


@cache
def names_in(path: str) -> set[str]:
    """``Class``, ``Class.method``, ``function`` and ``CONSTANT`` of a file."""
    found: set[str] = set()
    for node in ast.parse((PACKAGE / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            inner = (x.name for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {node.name, *(f"{node.name}.{name}" for name in inner)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("reference", REFERENCES)
def test_every_reference_names_a_definition(reference: str) -> None:
    path, _, name = reference.partition(": ")
    assert (PACKAGE / path).is_file(), f"docs/architecture.md names {path}, which is not there"
    assert not name or name in names_in(path), f"docs/architecture.md names {name}, which {path} does not define"


def test_the_larger_folders_are_shown_with_every_file() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## The larger folders")[1].split("\n## ")[0]
    tables = re.findall(r"^\| `([\w/]+)/` \|.*\n\|---\|---\|\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert len(tables) == 10
    for folder, rows in tables:
        shown = {
            name for cell in re.findall(r"^\| (.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
        }
        assert shown == {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"}, folder


def table() -> str:
    """The table of imports, as the page shows it."""
    shown = {part: ", ".join(f"`{x}`" for x in sorted(allowed)) for part, allowed in MAY_IMPORT.items()}
    rows = [f"| `{part}` | {allowed or 'nothing'} |" for part, allowed in shown.items()]
    return "\n".join(["| folder or file | may import |", "|---|---|", *rows, ""])


def test_the_table_of_imports_is_the_one_that_is_enforced() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run `python -m tests.test_architecture`: it rewrites the table"
    assert all(f"`{name}`" in PAGE.read_text(encoding="utf-8") for name in COMMON)


if __name__ == "__main__":
    before, after = re.split(r"\| folder or file \|(?:.+\n)+", PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + table() + after, encoding="utf-8")
