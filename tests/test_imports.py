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
COMMON = {"errors", "events", "common"}
"""Small modules that everybody may import; the protocol's own rule is narrower."""

MAY_IMPORT: dict[str, set[str]] = {
    "net": set(),
    "kernels": set(),
    "codecs": {"kernels"},
    "methods": {"codecs"},
    "fragments": {"methods"},
    "outer": {"methods"},
    "triggers": {"methods"},
    "run/fault_spec": set(),
    "run/fault_injector": {"run/fault_spec"},
    # All that people are shown.
    "watch": set(),
    "watch/report": {"watch"},
    "watch/trackers": {"watch"},
    # How payloads and states travel. Others know its types alone; `connect` chooses what stands behind them.
    "transport/interface": {"codecs"},
    "transport/lanes": {"transport/interface", "codecs"},
    "transport": {"transport/interface", "transport/lanes", "codecs", "net"},
    # The protocol: machines without clocks, threads or sockets. Its two sides meet in messages only.
    "sync/protocol": set(),
    "sync/protocol/ledger": {"sync/protocol"},
    "sync/protocol/coordinator/roster": {"sync/protocol"},
    "sync/protocol/coordinator/rounds": {
        "sync/protocol", "sync/protocol/ledger", "sync/protocol/coordinator/roster",
    },
    "sync/protocol/coordinator/members": {
        "sync/protocol", "sync/protocol/ledger", "sync/protocol/coordinator/roster", "sync/protocol/coordinator/rounds",
    },
    "sync/protocol/coordinator/entry": {
        "sync/protocol", "sync/protocol/coordinator/roster", "sync/protocol/coordinator/rounds",
        "sync/protocol/coordinator/members",
    },
    "sync/protocol/coordinator": {
        "sync/protocol", "sync/protocol/coordinator/roster", "sync/protocol/coordinator/rounds",
        "sync/protocol/coordinator/members", "sync/protocol/coordinator/entry",
    },
    "sync/protocol/replica": {"sync/protocol"},
    # The shells around the machines: the coordinator's, and the replica's.
    "sync/server": {
        "sync/protocol", "sync/protocol/coordinator", "sync/protocol/coordinator/entry",
        "sync/protocol/coordinator/roster", "sync/protocol/coordinator/rounds", "net", "watch",
    },
    "sync/replica/changed": set(),
    "sync/replica/units": {"sync/protocol", "sync/protocol/ledger", "sync/replica/changed"},
    "sync/replica/global_batch": {"sync/protocol", "sync/protocol/ledger", "sync/replica/changed"},
    "sync/replica/replica_copy": {"sync/protocol"},
    "sync/island": {"sync/protocol", "sync/replica/units"},
    "sync/island_protocol": set(),
    "sync/rank_links": {"sync/island"},
    "sync/group": {
        "sync/island", "sync/island_protocol", "sync/rank_links", "sync/protocol", "sync/protocol/replica",
        "transport/interface", "transport/lanes", "sync/replica/units", "sync/replica/global_batch",
        "sync/replica/replica_copy",
    },
    "sync/replica/log": {"sync/protocol"},
    "sync/replica": {
        "sync/group", "sync/protocol", "sync/protocol/replica", "transport/interface", "net",
        "sync/replica/log",
        "sync/replica/changed", "sync/replica/units", "sync/replica/global_batch", "sync/replica/replica_copy",
    },
    "sync/local": {"sync/protocol", "sync/replica", "sync/server", "transport/interface"},
    # A replica's place in a job, its samples, and checkpoints as files.
    "_connect": {"net", "sync/group", "sync/island", "sync/local", "sync/protocol", "sync/replica", "transport"},
    "data": {"sync/group", "sync/protocol/samples"},
    "checkpoint": {"transport/snapshot", "sync/protocol/limits", "sync/protocol/wire"},
    # The optimizer: of the outer-sync layer it knows `sync/group`.
    "step/inner": set(),
    "step/tensors": {"step/inner", "kernels", "methods"},
    "step/inner_state": {"step/inner", "step/tensors"},
    "step/outer": {"step/inner", "step/tensors", "methods", "codecs", "sync/group"},
    "optimizer/saved": {
        "step/inner", "step/inner_state", "step/tensors", "step/outer", "methods", "sync/group",
    },
    "optimizer/in_model": {"step/tensors", "step/outer"},
    "optimizer/asked": set(),
    "optimizer/ending": {"optimizer/asked", "step/outer", "sync/group"},
    "optimizer/ranks": {
        "step/inner", "step/inner_state", "optimizer/asked", "optimizer/in_model", "optimizer/saved", "step/tensors",
        "step/outer", "methods", "codecs", "sync/group",
    },
    "optimizer/undo": {"step/tensors", "step/outer", "sync/group"},
    "optimizer": {
        "step/inner", "optimizer/asked", "optimizer/ending", "optimizer/in_model", "step/tensors", "step/outer",
        "optimizer/saved", "optimizer/ranks", "optimizer/undo", "methods", "sync/group", "sync/protocol/policy",
        "_connect", "data", "checkpoint",
    },
    "undo": {"optimizer", "optimizer/undo"},
    # Checkpoints' own parts, recipes.
    "checkpoint/resuming": {
        "checkpoint", "optimizer", "step/inner_state", "optimizer/saved", "sync/group", "sync/protocol",
        "sync/protocol/replica",
    },
    "checkpoint/checkpoints": {
        "checkpoint", "checkpoint/resuming", "optimizer", "step/inner_state", "optimizer/saved", "step/tensors",
        "sync/protocol",
    },
    "config": {
        "codecs", "methods", "fragments", "outer", "triggers", "run/fault_spec", "sync/protocol/limits",
        "sync/protocol/policy",
    },
    # What a recipe makes, apart from the loop: for scripts, too (`ftopt.recipe`).
    "config/optimizers": {"config", "methods"},
    "config/objectives": {"config"},
    "config/models": {"config", "data"},
    "config/opened": {"config", "data"},
    "config/tasks": {"config", "data", "config/models", "config/objectives", "config/opened"},
    "config/parts": {"config", "data", "config/optimizers", "config/models", "config/tasks", "optimizer", "sync/group"},
    "__init__": {
        "codecs", "fragments", "outer", "triggers", "methods", "optimizer", "checkpoint", "checkpoint/checkpoints",
        "_connect", "data", "undo", "config/parts", "sync/group", "sync/protocol", "watch/trackers",
    },
    "config/plain": {
        "checkpoint", "config", "data", "config/optimizers", "config/opened", "methods", "sync/protocol/samples",
    },
    "run/harm": {"__init__", "run/fault_injector", "run/fault_spec", "step/outer", "sync/replica"},
    "run": {
        "__init__", "run/fault_injector", "run/fault_spec", "run/harm", "checkpoint", "codecs", "config",
        "config/models", "config/objectives", "config/optimizers", "config/parts", "config/plain", "config/tasks",
        "data", "methods", "net", "sync/group", "transport", "watch", "watch/trackers",
    },
    "run/scripts": {"checkpoint", "run", "run/fault_spec", "sync/protocol", "watch"},
    # What a job will reach, before it starts.
    "forecast": {
        "__init__", "codecs", "config", "config/optimizers", "config/tasks", "fragments", "methods", "run",
    },
    # Other people's trainers.
    "integrations": {"checkpoint/checkpoints", "data", "optimizer", "optimizer/asked", "optimizer/ending"},
    # A launcher: it sets what `connect` reads.
    "ray": {"net", "sync/server", "watch"},
    "cli/shared": {"__init__", "net"},
    "cli": {
        "cli/shared", "run", "run/fault_injector", "run/fault_spec", "run/scripts", "checkpoint", "config",
        "config/optimizers", "config/plain", "forecast", "net", "sync/server", "watch", "watch/report",
        "watch/trackers",
    },
    "__main__": {"cli"},
}  # fmt: skip
"""A folder or a file -> what it may import of ftopt, besides itself and `COMMON`. A file without a line of its own is
its folder's; a folder's name does not stand for the folders below it. A line imports only what lines above it say."""

TORCH_AND_NUMPY = {"methods", "codecs"}
IN_ONE_FILE = {
    "wandb": "watch/trackers/wandb.py",
    "omegaconf": "config/values.py",
    "rich": "watch/terminal.py",
    "sklearn": "data/digits.py",
    "numba": "kernels/jit.py",
    "torchdata": "data/workers.py",
    "transformers": "integrations/hf.py",
    "lightning": "integrations/lightning.py",
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
    """Modules, also those that only type checkers import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from {name if file_of(name) else node.module for name in names}


@cache
def file_of(module: str) -> str | None:
    """A module of the package as its path without ``.py``; None: it is none."""
    first, *rest = module.split(".")
    for path in (PACKAGE.joinpath(*rest).with_suffix(".py"), PACKAGE.joinpath(*rest, "__init__.py")):
        if first == "ftopt" and path.is_file():
            return path.relative_to(PACKAGE).with_suffix("").as_posix()
    return None


def graph() -> dict[str, set[str]]:
    """Each file, and those that it imports."""
    return {
        name.removesuffix(".py"): {target for module in imported if (target := file_of(module))}
        for name, imported in sources()
    }


def part_of(file: str, parts: set[str]) -> str:
    """The line of the table that a file belongs to."""
    return file if file in parts else file.rpartition("/")[0]


def test_every_part_imports_only_what_it_may() -> None:
    parts, wrong = MAY_IMPORT.keys() | COMMON, []
    for file, imported in graph().items():
        part = part_of(file, parts)
        for target in imported:
            allowed = {part, *COMMON, *MAY_IMPORT.get(part, ())}
            if target not in allowed and part_of(target, parts) not in allowed:
                wrong.append(f"{file} imports {target}")
    assert wrong == []


def test_every_line_of_the_table_imports_only_what_lines_above_it_say() -> None:
    above: set[str] = set()
    for part, allowed in MAY_IMPORT.items():
        assert {entry if entry in MAY_IMPORT else entry.rpartition("/")[0] for entry in allowed} <= above, part
        above.add(part)


def test_every_line_of_the_table_is_needed() -> None:
    parts = MAY_IMPORT.keys() | COMMON
    used: dict[str, set[str]] = {}
    for file, imported in graph().items():
        used.setdefault(part_of(file, parts), set()).update(imported, (part_of(target, parts) for target in imported))
    assert {part: unused for part, allowed in MAY_IMPORT.items() if (unused := allowed - used[part])} == {}


def test_no_import_cycle() -> None:
    left = graph()
    while free := {file for file, imported in left.items() if not imported & left.keys() - {file}}:
        left = {file: imported for file, imported in left.items() if file not in free}
    assert left == {}


def test_methods_and_codecs_import_torch_and_numpy_alone() -> None:
    for name, imported in sources():
        if name.split("/")[0] in TORCH_AND_NUMPY:
            foreign = {module.split(".")[0] for module in imported} - sys.stdlib_module_names - {"ftopt"}
            assert foreign <= {"torch", "numpy"}, name


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
    "torch", "numpy", "numba", "aiohttp", "wandb", "omegaconf", "rich", "yaml", "safetensors", "ftopt.cli", "ftopt.run",
    "ftopt.config",
)  # fmt: skip


def loaded_after(code: str) -> list[str]:
    """Which of `HEAVY` a fresh interpreter has loaded after ``code``."""
    code = f"import sys; {code}; sys.stderr.write(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    return got.stderr.split()


def test_import_ftopt_is_light() -> None:
    assert loaded_after("import ftopt") == []


def test_methods_and_codecs_bring_torch_when_they_compute() -> None:
    code = "from ftopt import DiLoCo, codecs; from ftopt.methods import method; DiLoCo(sync_every=5); codecs.TopK()"
    assert loaded_after(code) == ["numpy"]


def test_names_that_need_torch_bring_nothing_else() -> None:
    assert set(loaded_after("from ftopt import DiLoCo, wrap; from ftopt.methods import method")) <= {"torch", "numpy"}


@pytest.mark.parametrize(
    "verb",
    [
        "ls",
        "run dilco_bytes",
        "validate diloco_bytes lr",
        "replica nowhere.yaml",
        "plan dilco_bytes",
        "coordinator --help",
        "run --help",
        "report .",
        "--help",
    ],
)
def test_verbs_that_compute_nothing_do_without_torch(verb: str) -> None:
    code = f"from ftopt.cli.main import main\ntry: main({verb.split()!r})\nexcept SystemExit: pass\nimport sys"
    assert not {"torch", "aiohttp"} & set(loaded_after(f"exec({code!r})"))


def test_a_recipe_of_built_in_parts_is_validated_without_torch() -> None:
    code = "from ftopt.cli.main import main; assert main(['validate', 'streaming_bytes']) == 0"
    assert not {"torch", "aiohttp", "rich", "wandb"} & set(loaded_after(code))


def test_status_and_the_coordinator_do_without_torch() -> None:
    assert "torch" not in loaded_after("import ftopt.cli.status, ftopt.cli.coordinator, ftopt.sync.server.coordinator")
    assert "torch" not in loaded_after("import ftopt.run.runner, ftopt.watch.report.write, ftopt.checkpoint.reader")


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
    assert {*typed, *modules, "connect", "FaultPolicy"} <= set(dir(ftopt))
    with pytest.raises(AttributeError, match="no attribute 'Diloco'"):
        ftopt.Diloco  # noqa: B018


def test_users_mistakes_are_user_errors() -> None:
    """What checks settings raises `UserError`, a `ValueError`, and nothing more general."""
    checked = (
        "methods/",
        "codecs/",
        "config/",
        "data/",
        "run/fault_spec.py",
        "sync/protocol/policy.py",
        "sync/protocol/samples.py",
    )
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).as_posix().startswith(checked):
            found = [node.exc for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
            names = {node.func.id for node in found if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            assert not names & {"ValueError", "TypeError"}, path
