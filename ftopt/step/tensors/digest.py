"""Digests of tensors: SHA-256 over sums of blocks. One sweep at memory speed, and a bad block can be named.

Each tensor's raw bytes are cut into blocks of 64 KiB; a block's sum is that of its 64-bit words, modulo 2^64.
Any one flipped bit changes its block's sum. SHA-256 then runs over names, dtypes, shapes and sums, 8 bytes per block
instead of 65,536. It detects broken memory and wrong states, not forgeries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ftopt.step.tensors.mapped import is_mapped, let_go

BLOCK_BYTES = 64 * 1024
_WORD_BYTES = 8
_BLOCK_WORDS = BLOCK_BYTES // _WORD_BYTES
_AT_A_TIME = 8
"""Number of blocks of a tensor in a file that are read before their pages are released."""


def blocks_of(tensor: Tensor) -> int:
    """The number of sums that `block_sums` returns."""
    return -(-tensor.numel() * tensor.element_size() // BLOCK_BYTES)


def block_sums(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """The sums of a tensor's blocks: int64, on the CPU, one for each 64 KiB begun; in ``out``, without an allocation,
    or in new memory. ``tensor`` has any shape, dtype and device; it is copied only if it is not contiguous."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.int64) if out is None else out
    if out is not None and tensor.device.type == "cpu" and _has_whole_blocks(tensor):
        return torch.sum(tensor.detach().view(torch.int64).view(-1, _BLOCK_WORDS), dim=1, out=out)
    found = _block_sums_mapped(tensor) if is_mapped(tensor) else _block_sums(tensor)
    return found if out is None else out.copy_(found)


def _block_sums_mapped(tensor: Tensor) -> Tensor:
    sums = []
    for piece in torch.split(tensor.detach().reshape(-1), _AT_A_TIME * BLOCK_BYTES // tensor.element_size()):
        sums.append(_block_sums(piece))
        let_go(piece)
    return torch.cat(sums)


def _has_whole_blocks(tensor: Tensor) -> bool:
    plain = tensor.dim() == 1 and tensor.dtype == torch.float32 and tensor.is_contiguous()
    return plain and not tensor.numel() % (2 * _BLOCK_WORDS) and not tensor.storage_offset() % 2


def _block_sums(tensor: Tensor) -> Tensor:
    if _has_whole_blocks(tensor):  # the same as below, in fewer calls
        return tensor.detach().view(torch.int64).view(-1, _BLOCK_WORDS).sum(dim=1).cpu()
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    words = raw[: raw.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int64)
    blocks = words.numel() // _BLOCK_WORDS
    sums = [words[: blocks * _BLOCK_WORDS].view(-1, _BLOCK_WORDS).sum(dim=1)] if blocks else []
    if raw.numel() > blocks * BLOCK_BYTES:
        rest = words[blocks * _BLOCK_WORDS :].sum()
        if raw.numel() % _WORD_BYTES:
            odd_bytes = raw[words.numel() * _WORD_BYTES :].to(torch.int64)
            # Place values, so that two swapped bytes do not cancel out.
            places = torch.arange(odd_bytes.numel(), device=raw.device) * 8
            rest = rest + (odd_bytes << places).sum()
        sums.append(rest.reshape(1))
    return (torch.cat(sums) if len(sums) > 1 else sums[0]).cpu()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of named tensors: of names, dtypes, shapes and bytes, whatever the order of the mapping."""
    return digest_and_sums(tensors)[0]


def digest_and_sums(
    tensors: Mapping[str, Tensor], known: Mapping[str, Tensor] | None = None
) -> tuple[str, dict[str, Tensor]]:
    """`digest`, and each tensor's `block_sums`, for `damage`. ``known``: sums computed already."""
    sums = sums_of(tensors, known)
    return digest_of({name: (t.dtype, tuple(t.shape), sums[name]) for name, t in tensors.items()}), sums


def sums_of(tensors: Mapping[str, Tensor], known: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The `block_sums` of tensors, except ``known`` ones."""
    found = dict(known or {})
    return found | {name: block_sums(tensor) for name, tensor in tensors.items() if name not in found}


Described = Mapping[str, tuple[torch.dtype, tuple[int, ...], Tensor]]
"""Name -> dtype, shape and `block_sums`: the complete input of a digest."""


def digest_of(described: Described) -> str:
    """The digest of tensors with these sums."""
    sha = hashlib.sha256()
    for name in sorted(described):
        dtype, shape, sums = described[name]
        sha.update(f"{name}\0{dtype}\0{shape}\0".encode())
        sha.update(sums.numpy().astype("<i8").tobytes())
    return sha.hexdigest()


def largest(tensor: Tensor) -> float:
    """The largest absolute value; infinity for a NaN, 0 for nothing."""
    if not tensor.numel():
        return 0.0
    # One by one, since torch computes them together by scalar instructions.
    found = max(abs(float(end)) for end in (tensor.detach().amin(), tensor.detach().amax()))
    return math.inf if math.isnan(found) else found


def damage(tensor: Tensor, sums: Tensor) -> list[slice]:
    """The blocks of a flat tensor, as slices of its elements, that have changed since ``sums`` were computed."""
    size = BLOCK_BYTES // tensor.element_size()
    return [slice(b * size, (b + 1) * size) for b in (block_sums(tensor) != sums).nonzero().flatten().tolist()]
