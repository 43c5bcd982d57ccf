"""CUDA streams for work in parallel with training. On other devices these functions do nothing.

Work queued on one stream is done in order; work on two streams is not, unless one waits for the other. Each thread has
a current stream, by default the same one in all threads, which training uses. Work that another thread queued there
would delay training. Three rules keep the threads in order:

1. Work in parallel with training is queued on a stream of its own (`SideStream`), after its inputs, and its thread
   waits for its end. So results that another thread hands on are complete.
2. Results that training hands on need not be complete. The receiver waits for a `Point` (`reached`), or takes them from
   the default stream, which has been told to wait (`publish`).
3. Memory belongs to the stream on which it was allocated, which reuses it when the last tensor on it is gone, even if
   another stream still uses it. Work in parallel with training holds its tensors until it is complete; training, which
   never waits, marks the tensors that it uses (`used_here`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Point = torch.cuda.Event | None
"""A place in a stream; None on devices without streams."""


def reached(device: torch.device) -> Point:
    """The point after all work that the calling thread has queued so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def follow(device: torch.device, point: Point) -> None:
    """Makes later work of the calling thread wait for ``point``."""
    if point is not None:
        torch.cuda.current_stream(device).wait_event(point)


def to_host(tensor: Tensor) -> tuple[Tensor, Point]:
    """A copy in the host's memory, complete when the point is reached. Does not wait."""
    if tensor.device.type != "cuda":
        return tensor, None
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy, reached(tensor.device)


def finish(device: torch.device) -> None:
    """Waits until all work that the calling thread has queued is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def publish(device: torch.device) -> None:
    """Makes later work on the default stream wait for the work that the calling thread has queued."""
    if device.type == "cuda":
        torch.cuda.default_stream(device).wait_stream(torch.cuda.current_stream(device))


def used_here(tensors: Iterable[Tensor]) -> None:
    """Marks tensors, perhaps allocated on another stream, as used by the work that the calling thread queues."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class SideStream:
    """A stream of its own on each device, created when first needed. For one thread at a time."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after(self, point: Point, device: torch.device) -> Iterator[None]:
        """Queues work inside the block on this stream, after ``point``. The block ends when it is done, or has failed.

        Tensors from elsewhere that are used inside must be kept alive outside of the block.
        """
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._streams[device]):
            follow(device, point)
            try:
                yield
            finally:
                finish(device)
