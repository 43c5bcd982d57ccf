"""Memory of flat tensors that is used again. Fresh memory costs as much as three sweeps over it: the kernel clears it.

Anything may hold a tensor of an outer step for any time: the committed state, a peer that is being served, a checkpoint
that is being written, a piece that Gloo still uses. So memory is free when the last tensor, view or array on it is
gone.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ftopt.common.weakly import at_the_end

_KEPT = 3
"""Free blocks that are kept: what one outer step of one fragment needs. A block is used for sizes near its own."""
_NEAR = 1.25


class Memory:
    """Flat fp32 tensors in memory that is used again. Any thread."""

    def __init__(self) -> None:
        # Without a lock: memory may be given back in the middle of anything, also of what a lock would guard here. So
        # only a list of its keys is iterated over; nothing else runs while that is made.
        self._free: dict[int, Tensor] = {}

    def take(self, numel: int, device: torch.device) -> Tensor:
        """A flat fp32 tensor, uninitialized."""
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=torch.float32, device=device)  # the device's own allocator keeps memory
        block = self._near(numel)
        # An array of its own: it lives as long as any tensor on this memory does.
        array = block[:numel].numpy()
        weakref.finalize(array, at_the_end(self._give), block).atexit = False
        return torch.from_numpy(array)

    def like(self, flat: Tensor) -> Tensor:
        """The same, as long as ``flat`` and on its device."""
        return self.take(flat.numel(), flat.device)

    # For committed states, which may lie elsewhere (`ftopt.step.tensors.mapped`). Here they lie where they are
    # made.

    def check(self, device: torch.device) -> None:
        """Refuses a memory without room for the next states, once the first of a model on ``device`` are there."""

    def target(self, flat: Tensor) -> Tensor:
        """The tensor for a committed state that could lie in the memory of ``flat``."""
        return flat

    def place(self, tensor: Tensor) -> Tensor:
        """Moves a tensor of a committed state to where those lie; the caller does not use ``tensor`` again."""
        return tensor

    def release(self) -> None:
        """Frees what committed states take while they are not used. Any thread; they can be read all the same."""

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
