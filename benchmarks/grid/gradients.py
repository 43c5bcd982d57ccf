"""Loss and gradients of the byte GPT for stacked parameters: by ``gpt.cpp``, or by torch where that cannot be had.

``gpt.cpp`` takes a quarter of the time that torch takes, and is compiled for this machine at the first call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ftopt.config.models import Transformer

SOURCE = Path(__file__).with_name("gpt.cpp")
WITHOUT = "FTOPT_GRID_TORCH"
"""An environment variable: if set, torch is used."""
_SIZES = {"vocab": 256, "width": 64, "hidden": 256, "heads": 4, "layers": 2, "time": 64}
"""Those that ``gpt.cpp`` is made for."""


Named = Mapping[str, Tensor]


class Gradients(Protocol):
    """Sets one replica's gradients to those of a batch; returns the loss."""

    def __call__(self, inputs: Tensor, targets: Tensor, values: Named, into: Named) -> float:
        """Parameters and gradients by name, in the model's order; all contiguous."""


def gradients_of(model: nn.Module) -> Gradients:
    """The fastest way for this model on this machine."""
    library = None if os.environ.get(WITHOUT) or not _fits(model) else compiled()
    return with_torch(model) if library is None else _with(library, model)


def with_torch(model: nn.Module) -> Gradients:
    """The obvious way."""

    def gradients(inputs: Tensor, targets: Tensor, values: Named, into: Named) -> float:
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        logits = functional_call(model, leaves, (inputs,))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            into[name].copy_(gradient)
        return loss.item()

    return gradients


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """``gpt.cpp``; None without a compiler that makes it."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    text = SOURCE.read_bytes() + platform.node().encode()
    path = Path(tempfile.gettempdir(), f"ftopt-grid-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}.so")
    if not path.exists():
        new = path.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", str(SOURCE), "-o", str(new)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        new.replace(path)
    library = ctypes.CDLL(str(path))
    library.gradients.restype = ctypes.c_float
    return library


def _fits(model: nn.Module) -> bool:
    if not isinstance(model, Transformer):
        return False
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    vocab, width, hidden = _SIZES["vocab"], _SIZES["width"], _SIZES["hidden"]
    layer = [(width,), (3 * width, width), (width, width), (width,), (hidden, width), (width, hidden)]
    wanted = [(vocab, width), *layer * _SIZES["layers"], (width,), (vocab, width)]
    half = width // _SIZES["heads"] // 2
    return list(shapes.values()) == wanted and tuple(model.cos.shape) == (_SIZES["time"], half)


def _with(library: ctypes.CDLL, model: nn.Module) -> Gradients:
    assert isinstance(model, Transformer)
    count = len(list(model.parameters()))
    pointers = ctypes.c_void_p * count

    def gradients(inputs: Tensor, targets: Tensor, values: Named, into: Named) -> float:
        inputs, targets = inputs.contiguous(), targets.contiguous()
        assert inputs.shape == targets.shape == (len(inputs), _SIZES["time"])
        assert all(tensor.is_contiguous() for tensor in (*values.values(), *into.values()))
        loss: float = library.gradients(
            len(inputs),
            *map(_at, (inputs, targets)),
            pointers(*(value.data_ptr() for value in values.values())),
            pointers(*(value.data_ptr() for value in into.values())),
            *map(_at, (model.cos, model.sin)),
        )
        return loss

    return gradients


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
