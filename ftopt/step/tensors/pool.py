"""Copies in reused memory, since new memory costs several times as much as copying."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class CopyPool:
    """Copies of tensors; after `recycle` their memory is used for the next copies of the same shapes."""

    def __init__(self) -> None:
        self._lent: list[Tensor] = []
        self._free: dict[_Kind, list[Tensor]] = defaultdict(list)

    def recycle(self) -> None:
        """Frees the copies made so far for reuse, and releases memory that they did not use."""
        self._free.clear()
        for tensor in self._lent:
            self._free[tuple(tensor.shape), tensor.dtype, tensor.device].append(tensor)
        self._lent.clear()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor."""
        free = self._free[tuple(shape), dtype, device]
        tensor = free.pop() if free else torch.empty(tuple(shape), dtype=dtype, device=device)
        self._lent.append(tensor)
        return tensor

    def of(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the same device; for a sparse tensor or a tensor subclass, its clone."""
        odd = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested
        if odd or type(tensor) not in (Tensor, nn.Parameter):
            return tensor.detach().clone()
        return self.empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor.detach())
