"""Digests of the parameters that do not train, which must be equal on all replicas.

With different ones the same trained parameters make a different model. Each replica computes its own once, when it
starts, in one pass over them on their device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ftopt.common.plural import count
from ftopt.step.tensors.digest import block_sums
from ftopt.step.tensors.flat import local, uncompiled

_LINES = 128
"""Maximum number of names compared one by one; beyond it, those of a module are compared together."""
_NAME = 200
"""Maximum characters of a name in a message to the coordinator."""


@torch.no_grad()
def frozen_lines(model: nn.Module) -> dict[str, str]:
    """``frozen``: the number of such parameters; ``frozen.<name>``: a digest. Empty if everything trains.

    A tensor has no digest when this process does not hold all of it, or when its class gives no access to its bytes.
    """
    frozen = {uncompiled(name): p for name, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return {}
    shapes = "\n".join(f"{name} {_shape(frozen[name])}" for name in sorted(frozen))
    short = hashlib.sha256(shapes.encode()).hexdigest()[:12]
    lines = {"frozen": f"{count(len(frozen), 'tensor')} that do not train, {short}"}
    for group, names in _groups(sorted(frozen)).items():
        digests = [_digest(frozen[name]) for name in names]
        if None not in digests:
            lines[f"frozen.{group[:_NAME]}"] = hashlib.sha256(repr(digests).encode()).hexdigest()[:12]
    return lines


def _groups(names: list[str]) -> dict[str, list[str]]:
    """Names by module, at the level that gives few groups."""
    depth = max(name.count(".") for name in names) + 1
    while True:
        groups = dict[str, list[str]]()
        for name in names:
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        if len(groups) <= _LINES:
            return groups
        if depth == 1:
            return {"all": names}
        depth -= 1


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return () if isinstance(parameter, nn.UninitializedParameter) else tuple(parameter.shape)


def _digest(parameter: Tensor) -> str | None:
    if isinstance(parameter, nn.UninitializedParameter) or parameter.is_meta:
        return None
    try:
        tensor = local(parameter)
        if tensor.shape != parameter.shape:
            return None  # other ranks have the rest
        sha = hashlib.sha256()
        for part in _parts(tensor):
            sha.update(f"{part.dtype} {tuple(part.shape)}\0".encode())
            sha.update(block_sums(part).numpy().astype("<i8").tobytes())
        return sha.hexdigest()
    except (NotImplementedError, RuntimeError, TypeError):  # subclasses of tensors may lack operations
        return None


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Plain tensors with the contents of ``tensor``."""
    if tensor.is_quantized:
        yield from (tensor.int_repr(), tensor.dequantize())
    elif tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), tensor.values())
    elif tensor.layout != torch.strided:
        yield from _parts(tensor.to_sparse())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor
