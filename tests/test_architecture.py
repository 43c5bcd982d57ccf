"""``docs/architecture.md`` names what is there: files, folders, definitions, and layers that imports respect.
``docs/protocol.md`` names files that are there.

``python -m tests.test_architecture`` corrects the paths of definitions and files that have moved.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_imports import COMMON, MAY_IMPORT, PACKAGE

ROOT = PACKAGE.parent
PAGE = ROOT / "docs" / "architecture.md"
METHOD = re.compile(r"`([A-Z]\w*[a-z]\w*\.\w+)`")
REFERENCE = re.compile(r"`(?!file\.py)([\w/.]+\.(?:py|md|js)|[\w/]+/)(?::\s([\w.]+))?`")


def references() -> list[tuple[str, str]]:
    """Each file or folder that the page names, and what it names of it, or ""."""
    return sorted(set(REFERENCE.findall(PAGE.read_text(encoding="utf-8"))))


def found(path: str) -> Path | None:
    """Relative to the package, or of tests and pages to the repository."""
    return next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)


@cache
def names_in(file: Path) -> frozenset[str]:
    """``Class``, ``Class.method``, ``function`` and ``CONSTANT`` of a file."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            inner = (x.name for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {node.name, *(f"{node.name}.{name}" for name in inner)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


@pytest.mark.parametrize(("path", "name"), references())
def test_every_name_on_the_page_exists(path: str, name: str) -> None:
    file = found(path)
    assert file is not None, f"{PAGE} names {path}, which is not there; `python -m tests.test_architecture` may help"
    assert not name or name in names_in(file), f"{PAGE} names {name}, which {path} does not define"


@pytest.mark.parametrize("name", sorted(set(METHOD.findall(PAGE.read_text(encoding="utf-8")))))
def test_every_method_that_is_named_without_its_file_exists(name: str) -> None:
    assert any(name in names_in(file) for file in PACKAGE.rglob("*.py"))


def test_every_file_that_the_protocol_page_names_exists() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    files = [
        f"/{path.relative_to(ROOT).as_posix()}" for part in ("ftopt", "tests") for path in (ROOT / part).rglob("*.py")
    ]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


@cache
def layers() -> dict[str, int]:
    """Folder or file -> its row in the table of layers, counted from the top."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Layers\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {name: index for index, row in enumerate(rows) for name in re.findall(r"`([\w/]+)`", row)}


def layer_of(part: str) -> int:
    while part not in layers():
        assert "/" in part, f"no layer of the page has {part}"
        part = part.rpartition("/")[0]
    return layers()[part]


def test_no_layer_may_import_from_one_above_it() -> None:
    upwards = [(a, b) for a, allowed in MAY_IMPORT.items() for b in allowed if layer_of(b) < layer_of(a)]
    assert upwards == []
    assert {layer_of(part) for part in COMMON} == {max(layers().values())}


def test_the_layers_have_every_folder() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} - {"."}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert all(layer_of(part) >= 0 for part in folders | files)


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert [path for path in files if not path.read_text(encoding="utf-8").startswith(('"""', 'r"""'))] == []


def moved(path: str, name: str) -> str:
    """Where the definition, or a file of this name, is now; ``path`` if it is there or this is not certain."""
    if (file := found(path)) is not None and (not name or name in names_in(file)):
        return path
    places = [x for x in PACKAGE.rglob("*.py") if (name in names_in(x) if name else x.name == Path(path).name)]
    return places[0].relative_to(PACKAGE).as_posix() if len(places) == 1 else path


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for path, name in references():
        if (new := moved(path, name)) != path:
            old = rf"`{re.escape(path)}:(\s){re.escape(name)}`" if name else f"`{re.escape(path)}`"
            text = re.sub(old, f"`{new}:\\1{name}`" if name else f"`{new}`", text)
    PAGE.write_text(text, encoding="utf-8")
