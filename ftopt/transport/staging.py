"""Moves payloads between a device and the host's memory, where Gloo works: no copies, plain or asynchronous ones.

A reduction is written once, for payloads on any device: pieces go to the host (`Staging.begin`), through Gloo, and back
(`Staging.back`). On the CPU the host's tensor is the piece itself.

On a CUDA device (`PinnedStaging`) copies in both directions are queued on two streams of their own and done by the
device's copy engines, while Gloo reduces other pieces. They need page-locked memory, which is expensive to allocate.
torch caches it, and reuses memory only when its last tensor is gone and the copies queued with it are done. So no
buffer is in use twice, even after a reduction that failed and left Gloo writing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

_AHEAD = 2
"""Pieces whose copies to the host begin ahead of need."""


class Staging:
    """Moves tensors (1-D, contiguous) to the host and back. For one thread at a time.

    This class is for tensors on the host: it does nothing.
    """

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins to copy ``tensor``, as the caller has left it, to the host. Returns a function that waits for the
        host's tensor and returns it; ``tensor`` must not change before."""
        return lambda: tensor

    def room(self, tensor: Tensor) -> Tensor:
        """An uninitialized tensor on the host of the same size."""
        return tensor

    def back(self, host: Tensor, tensor: Tensor) -> None:
        """Begins to copy ``host`` to ``tensor``; ``host`` must not change any more."""

    def join(self) -> None:
        """Orders the caller's further work after all copies that were begun."""


class CopyStaging(Staging):
    """Copies that are done when the call returns, for any device."""

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = self.room(tensor).copy_(tensor)
        return lambda: host

    def room(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def back(self, host: Tensor, tensor: Tensor) -> None:
        tensor.copy_(host)


class PinnedStaging(Staging):
    """Copies on two streams of a CUDA device, through page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = self.room(tensor)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            host.copy_(tensor, non_blocking=True)
            copied = self._down.record_event()

        def wait() -> Tensor:
            copied.synchronize()
            return host

        return wait

    def room(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def back(self, host: Tensor, tensor: Tensor) -> None:
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._up):
            tensor.copy_(host, non_blocking=True)

    def join(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._down)
        current.wait_stream(self._up)


StagingFor = Callable[[torch.device], Staging]


def staging_for(device: torch.device) -> Staging:
    if device.type == "cpu":
        return Staging()
    return PinnedStaging(device) if device.type == "cuda" else CopyStaging()


def ahead(staging: Staging, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each piece with its host's tensor, while the next pieces are being copied."""
    coming: deque[tuple[Tensor, Callable[[], Tensor]]] = deque()
    for piece in pieces:
        coming.append((piece, staging.begin(piece)))
        if len(coming) > _AHEAD:
            first, wait = coming.popleft()
            yield first, wait()
    for first, wait in coming:
        yield first, wait()
