"""Memory of flat tensors that is used again. Fresh memory costs as much as three sweeps over it: the kernel clears it.

A tensor of an outer step may be held by anyone for as long as they like: the committed state, a peer that is being
served, a checkpoint that is being written, a piece that Gloo has not let go of. So nobody says when memory is free: it
is, when the last tensor, view or array that looks at it is gone.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

_KEPT = 3
"""Blocks that wait to be used: what one outer step of one fragment needs. A block is for sizes near its own."""
_NEAR = 1.25


class Memory:
    """Flat fp32 tensors of memory that others have let go of. Any thread."""

    def __init__(self) -> None:
        # Without a lock: memory may be given back in the middle of anything, also of what a lock would guard here. So
        # nothing goes through it but a list of its keys, during whose making nothing runs.
        self._free: dict[int, Tensor] = {}

    def take(self, numel: int, device: torch.device) -> Tensor:
        """A flat fp32 tensor with nothing in particular in it."""
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=torch.float32, device=device)  # the device's own allocator keeps memory
        block = self._near(numel)
        # An array of its own: it lives as long as any tensor on this memory does.
        array = block[:numel].numpy()
        weakref.finalize(array, self._give, block).atexit = False
        return torch.from_numpy(array)

    def like(self, flat: Tensor) -> Tensor:
        """The same, as long as ``flat`` and on its device."""
        return self.take(flat.numel(), flat.device)

    # For committed states, which may lie elsewhere (`ftopt.optimizer.tensors.mapped`). Here they lie where they are
    # made.

    def check(self, device: torch.device) -> None:
        """Whether there will be room, once the first states of a model on ``device`` are there. Raises UserError."""

    def target(self, flat: Tensor) -> Tensor:
        """Where a committed state goes that could lie in the memory of ``flat``."""
        return flat

    def place(self, tensor: Tensor) -> Tensor:
        """A tensor of a committed state, where those lie. Whoever gives it does not look at it again."""
        return tensor

    def release(self) -> None:
        """Nobody looks at a committed state for a while. Any thread; if somebody does, nothing is wrong."""

    def _near(self, numel: int) -> Tensor:
        for key in list(self._free):
            block = self._free.get(key)
            if block is None or not numel <= block.numel() <= _NEAR * numel:
                continue
            if self._free.pop(key, None) is not None:
                return block
        return self._new(numel)

    def _new(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.float32)

    def _give(self, block: Tensor) -> None:
        self._free[id(block)] = block
        for key in list(self._free)[:-_KEPT]:
            self._free.pop(key, None)
