"""Ctrl-C at several moments of a command's start, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ftopt

HOOK = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in a shell's background
def hook(event, arguments):
    if event == "import" and arguments[0] == os.environ["INTERRUPTED_AT"]:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""
COMMAND = "import sys; sys.argv[:1] = ['/usr/bin/ftopt']; from ftopt.cli.main import main; sys.exit(main())"


def interrupted(tmp_path: Path, at: str, *arguments: str) -> None:
    """The process gets SIGINT where it imports ``at``."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    paths = os.pathsep.join([str(tmp_path), str(Path(ftopt.__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "INTERRUPTED_AT": at}
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200.0)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "ftopt: interrupted\n", "")


MODULE = ["-m", "ftopt"]


@pytest.mark.parametrize(
    ("how", "at"),
    [
        (MODULE, "ftopt._connect"),
        (MODULE, "ftopt.cli.main"),
        (["-c", COMMAND], "dataclasses"),
        (["-c", COMMAND], "ftopt.config.shipped"),
    ],
)
def test_ctrl_c_while_ftopt_is_imported_is_one_line_and_status_130(how: list[str], at: str, tmp_path: Path) -> None:
    interrupted(tmp_path, at, *how, "ls")


@pytest.mark.parametrize("at", ["torch", "numpy.linalg", "torch.nn"])
def test_so_it_is_while_a_verb_imports_torch(at: str, tmp_path: Path) -> None:
    interrupted(tmp_path, at, *MODULE, "validate", "diloco_bytes", "inner.name=torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        "run diloco_bytes --dry-run",
        "plan diloco_bytes --step-s 0.1",
        "replica diloco_bytes --coordinator http://127.0.0.1:1",
        "export runs/x y",
    ],
)
def test_so_it_is_in_all_verbs_that_import_torch(verb: str, tmp_path: Path) -> None:
    interrupted(tmp_path, "torch", *MODULE, *verb.split())


def test_a_program_that_imports_ftopt_has_pythons_own_ctrl_c(tmp_path: Path) -> None:
    program = "import signal, ftopt; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200.0, cwd=tmp_path)
