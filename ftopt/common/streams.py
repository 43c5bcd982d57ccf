"""CUDA streams for what is done beside training. On other devices all of this is nothing.

Work queued on one stream is done in order; work on two streams is not, unless one waits for the other. Each thread has
a current stream, by default the same one in all threads, which training uses. Work that another thread queued there
would hold training up. Three rules keep the threads in order:

1. What is done beside training is queued on a stream of its own (`SideStream`), behind what it needs, and the thread
   waits for its end. So what another thread hands on is complete.
2. What training hands on need not be. The receiver waits for a `Point` (`reached`), or takes it from the default
   stream, which has been told to wait (`publish`).
3. Memory belongs to the stream that it was allocated on, and is used again there when the last tensor on it is gone,
   although another stream may have it in use. Work beside training holds its tensors until it is complete; training,
   which waits for nothing, says what it uses (`used_here`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Point = torch.cuda.Event | None
"""A place in a stream; None on devices without streams."""


def reached(device: torch.device) -> Point:
    """What the calling thread has queued so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def follow(device: torch.device, point: Point) -> None:
    """What the calling thread queues from here on comes after that."""
    if point is not None:
        torch.cuda.current_stream(device).wait_event(point)


def to_host(tensor: Tensor) -> tuple[Tensor, Point]:
    """The same in the host's memory, complete when the point is reached. Waits for nothing."""
    if tensor.device.type != "cuda":
        return tensor, None
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy, reached(tensor.device)


def finish(device: torch.device) -> None:
    """Waits until what the calling thread has queued is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def publish(device: torch.device) -> None:
    """What is queued on the default stream from here on comes after what the calling thread has queued."""
    if device.type == "cuda":
        torch.cuda.default_stream(device).wait_stream(torch.cuda.current_stream(device))


def used_here(tensors: Iterable[Tensor]) -> None:
    """What the calling thread queues will use them, and they may have been allocated on another stream."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class SideStream:
    """A stream of its own on each device, made when it is first needed. For one thread at a time."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after(self, point: Point, device: torch.device) -> Iterator[None]:
        """What is queued inside goes to this stream, after ``point``. The block ends when it is done, or has failed.

        Tensors from elsewhere that are used inside must be held outside of the block.
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
