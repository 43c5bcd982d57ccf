"""Export of a checkpoint's anchor as a plain state dict, for ``model.load_state_dict`` and Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftopt.checkpoint.disk import Disk, store
from ftopt.checkpoint.manifest import BadCheckpoint
from ftopt.checkpoint.part import FIXED, shard
from ftopt.checkpoint.reader import Checkpoint
from ftopt.errors import UserError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip


def state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns every name of the model's state dict, tied ones too.

    Trained parameters are the anchor's, rounded to their dtypes; buffers that the job does not average are those of the
    first replica.

    Raises:
        BadCheckpoint: a file is damaged, or does not describe a model.
    """
    first = checkpoint.replicas[0]
    model, own = checkpoint.notes[first]["model"], checkpoint.own(first)
    fixed = checkpoint.tensors(FIXED) if FIXED in checkpoint.manifest.files else {}
    anchors = [version.tensors["anchor"] for version in checkpoint.newest]
    try:
        found = {name: _tensor(place, own, fixed, anchors) for name, place in model["tensors"].items()}
        return found | {alias: found[name].clone() for alias, name in model["tied"].items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        path = checkpoint.path / checkpoint.manifest.replicas[first]
        raise BadCheckpoint(path, f"does not describe a model ({type(error).__name__}: {error})") from None


def _tensor(
    place: Mapping[str, Any], own: Mapping[str, Any], fixed: Mapping[str, Tensor], anchors: list[Tensor]
) -> Tensor:
    match place["in"]:
        case "fixed":
            return fixed[place["name"]]
        case "buffers":
            return torch.as_tensor(own["replica"]["buffers"][place["name"]])
        case "model":
            flat = torch.as_tensor(own["replica"]["model"])
        case fragment:
            flat = anchors[fragment]
    part = flat[place["start"] : place["stop"]]
    return part.view(place["shape"]).to(_DTYPES[place["dtype"]]).contiguous().clone()


def export(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """Writes the state dict to a new safetensors file and returns it.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    if path.exists():
        raise UserError(f"{path} already exists; give another FILE, or remove it first")
    tensors = state_dict(checkpoint)
    try:
        store(Disk(), path, shard(tensors, ftopt_version=str(checkpoint.manifest.version)))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another FILE") from error
    return tensors
