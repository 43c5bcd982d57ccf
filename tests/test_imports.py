"""Who may import whom: the rules of the house, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ftopt

PACKAGE = Path(__file__).resolve().parent.parent / "ftopt"
TYPES = {"net", "errors", "events", "rng", "streams", "tree"}
ASSEMBLERS = {"connect", "checkpointing", "http_state", "config", "cli", "job", "__init__", "__main__"}
"""Parts that put others together; everybody else is held to `ALLOWED`."""

ALLOWED = {
    "methods": {"codecs"},
    "outer": {"methods"},
    "fragments": {"methods"},
    "triggers": {"methods"},
    "codecs": set(),
    "optimizer": {"methods", "codecs", "sync.group"},
    "sync": {"transport.interface"},
    "transport": {"codecs"},
    "data": {"sync.protocol.samples"},
    "checkpoint": {"transport.snapshot"},
    "telemetry": set(),
    "faults": set(),
    "simulate": {"sync.protocol"},
}
"""Part -> what it may import of ftopt, besides itself and the types."""

TORCH_ALONE = {"methods", "codecs"}
IN_ONE_FILE = {
    "wandb": "telemetry/wandb.py",
    "omegaconf": "config/loader.py",
    "rich": "telemetry/progress.py",
    "sklearn": "data/digits.py",
    "torchdata": "data/workers.py",
}
AIOHTTP = {
    "net/http.py",
    "sync/server/connection.py",
    "sync/server/coordinator.py",
    "sync/replica/websocket.py",
    "transport/state_server.py",
    "transport/state_transfer.py",
}


@cache
def sources() -> list[tuple[str, list[str]]]:
    """Every file of the package, and the modules that it imports."""
    return [
        (path.relative_to(PACKAGE).as_posix(), list(imports(ast.parse(path.read_text(encoding="utf-8")))))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


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
    for name, imported in sources():
        part = part_of(name)
        if part in ASSEMBLERS | TYPES:
            continue
        for module in imported:
            if not module.startswith("ftopt."):
                continue
            target = module.removeprefix("ftopt.")
            allowed = {part, *TYPES, *ALLOWED[part]}
            if not any(target == entry or target.startswith(f"{entry}.") for entry in allowed):
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_nobody_but_assemblers_imports_the_package_itself() -> None:
    wrong = [name for name, imported in sources() if part_of(name) not in ASSEMBLERS and "ftopt" in set(imported)]
    assert wrong == []


def test_methods_and_codecs_import_torch_alone() -> None:
    for name, imported in sources():
        if part_of(name) in TORCH_ALONE:
            foreign = {module.split(".")[0] for module in imported} - sys.stdlib_module_names - {"ftopt"}
            assert foreign <= {"torch"}, name


def test_the_protocol_imports_the_standard_library_alone() -> None:
    for name, imported in sources():
        if name.startswith("sync/protocol/"):
            for module in imported:
                assert module.split(".")[0] in sys.stdlib_module_names or module.startswith(
                    ("ftopt.sync.protocol", "ftopt.errors")
                ), f"{name} imports {module}"


def test_the_protocol_has_no_clock_thread_socket_or_chance_of_its_own() -> None:
    banned = {"asyncio", "random", "secrets", "socket", "sqlite3", "threading", "time"}
    for name, imported in sources():
        if name.startswith("sync/protocol/"):
            assert not banned & {module.split(".")[0] for module in imported}, name


@pytest.mark.parametrize(("package", "home"), IN_ONE_FILE.items())
def test_a_foreign_package_is_imported_in_one_file(package: str, home: str) -> None:
    found = [name for name, imported in sources() if package in {module.split(".")[0] for module in imported}]
    assert found == [home]


def test_aiohttp_is_imported_in_shells_alone() -> None:
    found = {name for name, imported in sources() if "aiohttp" in {module.split(".")[0] for module in imported}}
    assert found <= AIOHTTP


HEAVY = (
    "torch", "numpy", "aiohttp", "wandb", "omegaconf", "rich", "yaml", "safetensors", "ftopt.cli", "ftopt.job",
    "ftopt.config",
)  # fmt: skip


def loaded_after(code: str) -> list[str]:
    """Which of `HEAVY` a fresh interpreter has loaded after ``code``."""
    code = f"import sys; {code}; sys.stderr.write(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return got.stderr.split()


def test_import_ftopt_is_light() -> None:
    assert loaded_after("import ftopt") == []


def test_names_that_need_torch_bring_nothing_else() -> None:
    assert set(loaded_after("from ftopt import DiLoCo, wrap; from ftopt.methods import method")) <= {"torch", "numpy"}


@pytest.mark.parametrize("verb", ["ls", "simulate --histories 1", "coordinator --help", "run --help", "--help"])
def test_verbs_that_compute_nothing_do_without_torch(verb: str) -> None:
    code = f"from ftopt.cli.main import main\ntry: main({verb.split()!r})\nexcept SystemExit: pass\nimport sys"
    assert not {"torch", "aiohttp"} & set(loaded_after(f"exec({code!r})"))


def test_status_and_the_coordinator_do_without_torch() -> None:
    assert "torch" not in loaded_after("import ftopt.cli.status, ftopt.cli.coordinator, ftopt.sync.server.coordinator")


def test_every_public_name_is_there_now_or_later() -> None:
    (block,) = [node for node in ast.parse(Path(ftopt.__file__).read_text()).body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    modules = {name for name, module in typed.items() if module == "ftopt"}
    assert modules == set(ftopt._MODULES)
    for name in modules:
        assert getattr(ftopt, name) is sys.modules[f"ftopt.{name}"]
    typed = {name: module for name, module in typed.items() if name not in modules}
    assert typed == ftopt._LATER
    for name, module in typed.items():
        assert getattr(ftopt, name) is getattr(sys.modules[module], name)
    assert {*typed, *modules, "connect", "Sync"} <= set(dir(ftopt))
    with pytest.raises(AttributeError, match="no attribute 'Diloco'"):
        ftopt.Diloco  # noqa: B018
