"""Tracks a buffer of a module for the whole job, whatever user code does with it.

Replicas agree on a buffer's shape and dtype at the start. User code may put another tensor there, or none. A tensor
that does not fit is left alone, and a stand-in with the last fitting values takes its place, so that the other replicas
go on.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)


class Place:
    """The buffer ``key`` of ``module``, called ``name``. A call returns a writable tensor of the agreed shape and
    dtype."""

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        self._module, self._key, self._name = module, key, name
        first = getattr(module, key)
        self._shape, self._dtype, self._layout = first.shape, first.dtype, first.layout
        self._last: Tensor = first
        self._stands_in = self._warned = False

    def __call__(self) -> Tensor:
        found = getattr(self._module, self._key, None)
        if not isinstance(found, Tensor) or not self._fits(found):
            return self._stand_in(found)
        if found.is_inference() or _overlaps(found):
            with torch.inference_mode(False), torch.no_grad():
                found = found.clone(memory_format=torch.contiguous_format)
            self._module._buffers[self._key] = found
        self._last, self._stands_in = found, False
        return found

    def _fits(self, tensor: Tensor) -> bool:
        return (tensor.shape, tensor.dtype, tensor.layout) == (self._shape, self._dtype, self._layout)

    @torch.no_grad()
    def _stand_in(self, found: object) -> Tensor:
        if not self._stands_in:
            last = self._last.detach()
            if not self._fits(last):  # it was resized in place
                last = last.reshape(-1)[: self._shape.numel()].to(self._dtype)
                last = torch.cat([last, last.new_zeros(self._shape.numel() - last.numel())]).view(self._shape)
            self._last, self._stands_in = last.clone(memory_format=torch.contiguous_format), True
        if not self._warned:
            self._warned = True
            now = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else f"{type(found).__name__}"
            _log.warning(
                "buffer %s was %s %s when training started, and is %s now: this replica keeps it as its own from now "
                "on, and the average goes on with the last values that fitted; keep its shape and dtype, or use "
                "buffers=local, or register it with persistent=False",
                self._name,
                tuple(self._shape),
                self._dtype,
                "gone" if found is None else now,
            )
        return self._last


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as after `Tensor.expand`, so that they cannot be written."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    dims = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0
    for step, size in dims:
        if step <= reach:
            return bool(tensor.numel())  # perhaps; a copy is always safe
        reach += step * (size - 1)
    return False
