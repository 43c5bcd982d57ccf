"""Chooses the device that a replica trains on, and compiles its model."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from typing import TYPE_CHECKING

import torch

from ftopt.errors import FtoptError, UserError

if TYPE_CHECKING:
    from ftopt.config.tasks import Task


def device_of(setting: str, replica: str) -> torch.device:
    """The device that ``train.device`` selects for a replica.

    Args:
        setting: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        replica: its id. ``auto`` and ``cuda`` give replica i of a machine GPU i modulo their number, i the number at
            the end of the id (0 without one).

    Raises:
        UserError: the device does not exist.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not there:
        raise UserError(
            f"train.device={setting}, but torch {torch.__version__} finds no CUDA device here; use train.device=cpu, "
            "or a torch for CUDA and a machine with a GPU"
        )
    if ":" not in setting:
        number = re.search(r"\d+$", replica)
        return torch.device("cuda", int(number.group()) % there if number else 0)
    index = int(setting.partition(":")[2])
    if index >= there:
        raise UserError(f"train.device={setting}, but there are {there} CUDA devices; use cuda:0 to cuda:{there - 1}")
    return torch.device("cuda", index)


def check_compiler(device: torch.device) -> None:
    """Raises UserError if ``torch.compile`` cannot work for lack of a compiler."""
    off = "or use train.compile=false"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError(f"train.compile=true on a GPU needs Triton: pip install triton, {off}")
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UserError(
            f"train.compile=true needs a C++ compiler, and there is no {compiler} here; install one (apt install g++), "
            f"name one in the environment variable CXX, {off}"
        )


def compile_model(task: Task) -> None:
    """Compiles the task's model in place, and tries it, so that the replica joins after compilation.

    Raises:
        UserError: there is no compiler, or the model cannot be compiled.
    """
    check_compiler(task.device)
    task.model.compile()
    try:
        task.try_out(whole=True)
    except FtoptError as error:
        raise UserError(f"train.compile=true: {error}; use train.compile=false if it trains without") from error
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise UserError(f"train.compile=true: {type(error).__name__}: {text}; use train.compile=false") from error
