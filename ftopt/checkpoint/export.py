"""Export of a checkpoint's anchor as a plain state dict, for ``model.load_state_dict`` and Hugging Face."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftopt.checkpoint.disk import Disk, store
from ftopt.checkpoint.manifest import BadCheckpoint
from ftopt.checkpoint.part import FIXED, file_bytes
from ftopt.checkpoint.reader import Checkpoint
from ftopt.common.tree import PLAIN, unflatten
from ftopt.errors import UserError
from ftopt.transport.snapshot import STORED

FORMATS = (".safetensors", ".pt", ".pth")

_OWN = "buffers", "model"
"""The parts of a checkpoint, besides the committed state, that hold tensors of the model."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PLAIN}


def state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns every name of the model's state dict, tied ones too.

    Trained parameters are the anchor's, rounded to their dtypes; buffers that the job does not average are the first
    replica's.

    Raises:
        BadCheckpoint: a file is damaged, or does not describe a model.
    """
    first = checkpoint.replicas[0]
    model = checkpoint.notes[first]["model"]
    fixed = checkpoint.tensors(FIXED) if FIXED in checkpoint.manifest.files else {}
    anchors = [version.tensors["anchor"] for version in checkpoint.newest]
    try:
        there = {name: place for name, place in model["tensors"].items() if place["in"] != "nowhere"}
        needed = [part for part in _OWN if any(place["in"] == part for place in there.values())]
        own = checkpoint.own(first, only=needed) if needed else {}
        found = {name: _tensor(place, own, fixed, anchors) for name, place in there.items()}
        return found | {alias: found[name].clone() for alias, name in model["tied"].items() if name in found}
    except BadCheckpoint:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        path = checkpoint.path / checkpoint.manifest.replicas[first]
        raise BadCheckpoint(path, f"does not describe a model ({type(error).__name__}: {error})") from None


def _tensor(
    place: Mapping[str, Any], own: Mapping[str, Any], fixed: Mapping[str, Tensor], anchors: list[Tensor]
) -> Tensor:
    match place["in"]:
        case "fixed":
            value: Tensor = unflatten(place["value"], fixed)
            return value
        case "buffers":
            return torch.as_tensor(own["replica"]["buffers"][place["name"]])
        case "model":
            flat = torch.as_tensor(own["replica"]["model"])
        case fragment:
            flat = anchors[fragment]
    part = flat[place["start"] : place["stop"]]
    return part.view(place["shape"]).to(_DTYPES[place["dtype"]]).contiguous().clone()


def left_out(checkpoint: Checkpoint) -> list[str]:
    """The reason for each tensor of the model's state dict that the checkpoint lacks."""
    places = checkpoint.notes[checkpoint.replicas[0]]["model"]["tensors"].values()
    return [place["reason"] for place in places if place["in"] == "nowhere"]


def check_target(path: Path, *, force: bool = False) -> None:
    """Raises UserError unless `export` can write ``path``: its format is known, and no file is in the way."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: the ending says the format, and must be one of {', '.join(FORMATS)}")
    if path.is_dir() or (path.exists() and not force):
        hint = "give another FILE" if path.is_dir() else "give another FILE, or --force to replace it"
        raise UserError(f"{path} already exists; {hint}")


def export(checkpoint: Checkpoint, path: Path, *, force: bool = False) -> dict[str, Tensor]:
    """Writes the state dict to a file and returns it.

    Args:
        path: ``.safetensors``, or ``.pt`` or ``.pth`` for `torch.load` with ``weights_only=True``.
        force: whether an existing file is replaced.

    Raises:
        UserError: the file exists, has another ending, cannot hold one of the tensors, or cannot be written.
    """
    check_target(path, force=force)
    tensors = state_dict(checkpoint)
    write(tensors, path, version=checkpoint.manifest.version)
    return tensors


def write(tensors: Mapping[str, Tensor], path: Path, *, version: int) -> None:
    """Writes tensors to a file, in one step; raises as `export` does. ``path``: as for `export`; replaced if it exists.
    ``version``: the committed version that they are of, for the file's own record."""
    for name, tensor in tensors.items() if path.suffix == ".safetensors" else ():
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.dtype not in STORED:
            form = f"a {type(tensor).__name__}"
            if isinstance(tensor, Tensor):
                form += f", {str(tensor.layout).removeprefix('torch.')}, of {tensor.dtype}"
            raise UserError(f"{name} is {form}, which a .safetensors file cannot hold; write a .pt file")
    chunks: Iterable[memoryview | bytes]
    if path.suffix == ".safetensors":
        chunks = file_bytes(tensors, ftopt_version=str(version))
    else:
        buffer = io.BytesIO()
        torch.save(dict(tensors), buffer)
        chunks = [buffer.getbuffer()]
    try:
        store(Disk(), path, chunks)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another FILE") from error


def how_to_load(path: Path, recipe: Path | None) -> str:
    """Lines of Python that load the file that `export` has written at ``path``. ``recipe``: the run's recipe, from
    which to make the model."""
    lines = ["import safetensors.torch" if path.suffix == ".safetensors" else "import torch"]
    if recipe is not None:
        lines = ["import ftopt", *lines, f"model = ftopt.recipe({str(recipe)!r}).build_model()"]
    read = f"safetensors.torch.load_file({str(path)!r})"
    if path.suffix != ".safetensors":
        read = f"torch.load({str(path)!r}, weights_only=True)"
    return "\n".join([*lines, f"model.load_state_dict({read})"])
