"""Who may import whom: the rules of the house, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ftopt"
TYPES = {"doors", "errors", "events"}
ASSEMBLERS = {"connect", "http_state", "config", "cli", "job", "__init__", "__main__"}
"""Parts that put others together; everybody else is held to `ALLOWED`."""

ALLOWED = {
    "methods": {"codecs"},
    "codecs": set(),
    "optimizer": {"methods", "codecs", "sync.group"},
    "sync": set(),
    "transport": set(),
    "data": set(),
    "checkpoint": set(),
    "telemetry": set(),
    "faults": set(),
    "simulate": {"sync.protocol"},
}
"""Part -> what it may import of ftopt, besides itself and the types."""

TORCH_ALONE = {"methods", "codecs"}
IN_ONE_FILE = {"wandb": "telemetry/wandb.py", "omegaconf": "config/loader.py", "rich": "telemetry/progress.py"}
AIOHTTP = {
    "doors/http.py",
    "sync/connection.py",
    "sync/coordinator.py",
    "sync/websocket.py",
    "transport/state_server.py",
    "transport/state_transfer.py",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module


def part_of(name: str) -> str:
    return name.removesuffix(".py").split("/")[0]


def test_every_part_imports_only_what_it_may() -> None:
    wrong = []
    for name, tree in sources():
        part = part_of(name)
        if part in ASSEMBLERS | TYPES:
            continue
        for module in imports(tree):
            if not module.startswith("ftopt."):
                continue
            target = module.removeprefix("ftopt.")
            allowed = {part, *TYPES, *ALLOWED[part]}
            if not any(target == entry or target.startswith(f"{entry}.") for entry in allowed):
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_nobody_but_assemblers_imports_the_package_itself() -> None:
    wrong = [name for name, tree in sources() if part_of(name) not in ASSEMBLERS and "ftopt" in set(imports(tree))]
    assert wrong == []


def test_methods_and_codecs_import_torch_alone() -> None:
    for name, tree in sources():
        if part_of(name) in TORCH_ALONE:
            foreign = {module.split(".")[0] for module in imports(tree)} - sys.stdlib_module_names - {"ftopt"}
            assert foreign <= {"torch"}, name


def test_the_protocol_imports_the_standard_library_alone() -> None:
    for name, tree in sources():
        if name.startswith("sync/protocol/"):
            for module in imports(tree):
                assert module.split(".")[0] in sys.stdlib_module_names or module.startswith(
                    ("ftopt.sync.protocol", "ftopt.errors")
                ), f"{name} imports {module}"


def test_the_protocol_has_no_clock_thread_socket_or_chance_of_its_own() -> None:
    banned = {"asyncio", "random", "secrets", "socket", "sqlite3", "threading", "time"}
    for name, tree in sources():
        if name.startswith("sync/protocol/"):
            assert not banned & {module.split(".")[0] for module in imports(tree)}, name


@pytest.mark.parametrize(("package", "home"), IN_ONE_FILE.items())
def test_a_foreign_package_is_imported_in_one_file(package: str, home: str) -> None:
    found = [name for name, tree in sources() if package in {module.split(".")[0] for module in imports(tree)}]
    assert found == [home]


def test_aiohttp_is_imported_in_shells_alone() -> None:
    found = {name for name, tree in sources() if "aiohttp" in {module.split(".")[0] for module in imports(tree)}}
    assert found <= AIOHTTP


def test_import_ftopt_is_light() -> None:
    heavy = ["aiohttp", "wandb", "omegaconf", "rich", "yaml", "safetensors", "ftopt.cli", "ftopt.job", "ftopt.config"]
    code = f"import sys, ftopt; print([name for name in {heavy!r} if name in sys.modules])"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert got.stdout.strip() == "[]"
