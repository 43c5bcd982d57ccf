"""What works without the extras, and the one message of what does not.

Nothing is uninstalled: an interpreter that starts with ``without`` in its path finds none of the optional packages, and
neither do the processes that it starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftopt.cli.main import main
from tests.pages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

OPTIONAL = (
    "omegaconf", "yaml", "rich", "torchdata", "wandb", "tensorboard", "numba", "llvmlite", "sklearn",
    "torchao",
)  # fmt: skip
REQUIRED = {"torch", "numpy", "aiohttp", "safetensors"}

TRAINED = """
import threading, torch, ftopt
from torch import nn

def train(group):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=5), group=group)
    data = ftopt.DataLoader([(torch.randn(4), torch.randn(1)) for _ in range(400)], 4, group=group, epochs=None)
    with optimizer:
        for inputs, targets in data:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.inner_step >= 20:
                break
    with optimizer.global_parameters():
        found.append([round(float(x), 6) for x in model.weight.flatten()])

found = []
threads = [threading.Thread(target=train, args=(group,)) for group in ftopt.local_groups(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), found[0] == found[1])
"""

SCRIPT = """
import torch, ftopt
from torch import nn

model = nn.Linear(4, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=5), group=ftopt.connect())
with optimizer:
    while optimizer.inner_step < 20:
        model(torch.randn(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

WORKERS = """
import ftopt
if __name__ == "__main__":
    print(sorted(x for batch in ftopt.DataLoader(range(8), 2, epochs=1, num_workers=1) for x in batch.tolist()))
"""


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds no optional package."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "FTOPT_"))}
    return kept | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "HOME": str(folder)}


def python(*words: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=300)


def ftopt(*words: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "ftopt", *words, env=env, cwd=cwd)


def test_the_processes_of_these_tests_find_no_optional_package(thin: dict[str, str], tmp_path: Path) -> None:
    for name in OPTIONAL:
        assert "ModuleNotFoundError" in python("-c", f"import {name}", env=thin, cwd=tmp_path).stderr


def test_every_public_name_is_there_without_extras(thin: dict[str, str], tmp_path: Path) -> None:
    got = python("-W", "error", "-c", "from ftopt import *; print(wrap, recipe, Wandb)", env=thin, cwd=tmp_path)
    assert got.returncode == 0, got.stderr


def test_two_replicas_in_a_process_train_without_extras(thin: dict[str, str], tmp_path: Path) -> None:
    got = python("-c", TRAINED, env=thin, cwd=tmp_path)
    assert (got.returncode, got.stdout) == (0, "2 True\n"), got.stderr


def test_workers_load_a_map_style_data_set_without_extras(thin: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "loads.py").write_text(WORKERS)
    got = python("loads.py", env=thin, cwd=tmp_path)
    assert got.stdout == f"{list(range(8))}\n", got.stderr


@pytest.fixture
def coordinator(thin: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The address of one that runs without extras."""
    words = [sys.executable, "-m", "ftopt", "coordinator", "--bind", "127.0.0.1:0", "--new", "--start-replicas", "2"]
    with subprocess.Popen(words, env=thin, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            server.terminate()
            server.communicate(timeout=60)


def test_coordinator_status_and_launch_work_without_extras(
    coordinator: str, thin: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    got = ftopt("launch", "-n", "2", "--join", coordinator, "train.py", env=thin, cwd=tmp_path)
    assert got.returncode == 0, got.stdout + got.stderr
    got = ftopt("status", "--json", coordinator, env=thin, cwd=tmp_path)
    assert [job["job"] for job in json.loads(got.stdout)["jobs"]] == ["default"], got.stderr
    assert "default" in ftopt("status", coordinator, env=thin, cwd=tmp_path).stdout


def test_launch_with_its_own_coordinator_and_its_report_work_without_extras(
    thin: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in ("one", "two"):
        got = ftopt("launch", "-n", "2", "--folder", name, "train.py", env=thin, cwd=tmp_path)
        assert got.returncode == 0 and "report: " in got.stdout, got.stdout + got.stderr
    got = ftopt("report", "one", "two", "--output", "both.html", env=thin, cwd=tmp_path)
    assert got.returncode == 0 and (tmp_path / "both.html").is_file(), got.stderr


@pytest.mark.parametrize("words", ["--help", "ls", "run --help", "cp localsgd_bytes"])
def test_commands_that_need_no_extra(words: str, thin: dict[str, str], tmp_path: Path) -> None:
    got = ftopt(*words.split(), env=thin, cwd=tmp_path)
    assert (got.returncode, got.stderr) == (0, "") and got.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run diloco_bytes", "a recipe needs PyYAML, which is not installed; pip install 'ftopt[cli]'"),
        ("validate diloco_bytes", "a recipe needs PyYAML"),
        ("plan diloco_bytes --step-s 1", "a recipe needs PyYAML"),
        ("replica diloco_bytes --coordinator http://127.0.0.1:9", "a recipe needs PyYAML"),
        ("cp diloco_bytes --full", "a recipe needs PyYAML"),
        ("resume .", "a recipe needs PyYAML"),
    ],
)
def test_a_command_that_needs_an_extra_says_which_in_one_line(
    words: str, message: str, thin: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text("base: diloco_bytes\n")
    (tmp_path / "checkpoint").mkdir()
    got = ftopt(*words.split(), env=thin, cwd=tmp_path)
    assert got.returncode == 2
    (line,) = got.stderr.splitlines()
    assert line.startswith("ftopt: ") and message in line


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ftopt.recipe('diloco_bytes')", "a recipe needs PyYAML, which is not installed; pip install 'ftopt[cli]'"),
        ("ftopt.Wandb()", "ftopt.Wandb needs wandb, which is not installed; pip install 'ftopt[wandb]'"),
        ("ftopt.TensorBoard('runs')", "needs tensorboard, which is not installed; pip install 'ftopt[tensorboard]'"),
        ("ftopt.DataLoader(Stream(), 2)", "needs torchdata, which is not installed; pip install 'ftopt[data]'"),
    ],
)
def test_a_name_that_needs_an_extra_says_which(code: str, message: str, thin: dict[str, str], tmp_path: Path) -> None:
    stream = "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self): return iter(range(8))\n"
    tried = f"try: {code}\nexcept ftopt.errors.UserError as error: print(error)\n"
    got = python("-c", f"import torch, ftopt\n{stream}{tried}", env=thin, cwd=tmp_path)
    assert message in got.stdout, got.stderr


def test_a_terminal_without_rich_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftopt.watch import terminal

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(terminal.display_for(print), terminal.PlainLines)


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_recipe_that_asks_for_wandb_says_which_extra_it_needs(
    mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for recipe in ("diloco_bytes", "own_images"):
        assert main(["run", recipe, f"log.wandb={mode}"]) == 2
        wanted = f"log.wandb={mode} needs wandb, which is not installed; pip install 'ftopt[wandb]'"
        assert wanted in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_package_requires_four_packages_and_its_extras_the_rest() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {re.split("[><=]", line)[0] for line in project["dependencies"]} == REQUIRED
