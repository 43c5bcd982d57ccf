"""Reused memory for flat tensors. New memory costs as much as three sweeps over it, since the kernel clears it.

A tensor of an outer step may be held for any time: by the committed state, a peer being served, a checkpoint being
written, or Gloo. So memory is free when the last tensor, view or array on it is gone.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ftopt.common.weakly import at_the_end

_KEPT = 5
"""Number of free blocks kept: enough for one outer step of one fragment, which takes a mean, two tensors of the outer
state and both hops' errors of a codec. A block is reused for similar sizes."""
_NEAR = 1.25


class Memory:
    """Flat fp32 tensors in reused memory. Any thread."""

    def __init__(self) -> None:
        # Without a lock: memory may be returned at any point, even within a section that a lock would guard. So loops
        # iterate over a list of the keys, which is made atomically.
        self._free: dict[int, Tensor] = {}

    def take(self, numel: int, device: torch.device) -> Tensor:
        """A flat fp32 tensor, uninitialized."""
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=torch.float32, device=device)  # the device's own allocator reuses memory
        block = self._near(numel)
        # A separate array, which lives as long as any tensor on this memory.
        array = block[:numel].numpy()
        weakref.finalize(array, at_the_end(self._give), block).atexit = False
        return torch.from_numpy(array)

    def like(self, flat: Tensor) -> Tensor:
        """A tensor of the length of ``flat``, on its device, uninitialized."""
        return self.take(flat.numel(), flat.device)

    # For committed states, which may lie elsewhere (`ftopt.step.tensors.mapped`). Here they stay where they are made.

    def check(self, device: torch.device) -> None:
        """Refuses memory without room for the next states, once the first ones of a model on ``device`` exist."""

    def target(self, flat: Tensor) -> Tensor:
        """A tensor for a committed state that could otherwise use the memory of ``flat``."""
        return flat

    def place(self, tensor: Tensor) -> Tensor:
        """Moves a tensor of a committed state to their memory; the caller does not use ``tensor`` again."""
        return tensor

    def release(self) -> None:
        """Frees the resident memory of committed states that are not in use. Any thread; they stay readable."""

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
