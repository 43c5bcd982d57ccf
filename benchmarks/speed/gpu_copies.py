"""How fast a model's fp32 parameters are copied on a GPU, to the host, and back, as a round does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.speed.figures import QUICK_REPETITIONS, REPETITIONS, NotHereError, Row, Spread, in_turns
from ftopt.step.tensors import pieces
from ftopt.step.tensors.digest import block_sums, blocks_of
from ftopt.transport.staging import CopyStaging, Staging, ahead, staging_for

ABOUT = (
    "124 million fp32 values on one GPU, 496 MB, counted once per copy. A snapshot is the copy that methods with delay "
    "make, with the norm of what has changed; *page-locked* is the way of payloads, in pieces of 4 MiB; *pageable* are "
    "plain copies of such pieces."
)
GOALS = "page-locked copies at the rate of the link"
DRAWN = "GB/s"
_NUMEL, _PIECE = 124_000_000, 1 << 20


def run(quick: bool) -> list[Row]:
    """A row per copy.

    Raises:
        NotHereError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise NotHereError("torch finds no CUDA device")
    return measured(torch.device("cuda", 0), QUICK_REPETITIONS if quick else REPETITIONS, _NUMEL)


def measured(device: torch.device, repetitions: int, numel: int) -> list[Row]:
    """The rows, for so many values."""
    flat = torch.randn(numel, device=device)
    anchor, snapshot = torch.randn_like(flat), torch.empty_like(flat)
    sums = torch.empty(blocks_of(flat), dtype=torch.int64)
    works: dict[str, Callable[[], object]] = {
        "snapshot": lambda: pieces.copy(_parts(flat), anchor, snapshot, numel, numel).norm,
        "plain copy on the GPU": lambda: snapshot.copy_(flat),
        "digest": lambda: block_sums(flat, sums),
    }
    for name, staging in (("page-locked", staging_for(device)), ("pageable", CopyStaging())):
        works[f"{name}, to the host"] = partial(_down, staging, flat)
        works[f"{name}, to the host and back"] = partial(_both, staging, flat)
    found = in_turns({name: partial(_timed_s, work, device) for name, work in works.items()}, repetitions)
    return [
        {
            "what": name,
            "ms": Spread.of([1000 * t for t in taken]),
            "GB/s": Spread.of([4e-9 * numel / t for t in taken]),
        }
        for name, taken in found.items()
    ]


def _timed_s(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _parts(flat: Tensor) -> Iterator[tuple[Tensor, slice]]:
    size = pieces.piece_of(flat)
    for start in range(0, flat.numel(), size):
        where = slice(start, min(start + size, flat.numel()))
        yield flat[where], where


def _down(staging: Staging, flat: Tensor) -> None:
    for _ in ahead(staging, torch.split(flat, _PIECE)):
        pass
    staging.join()


def _both(staging: Staging, flat: Tensor) -> None:
    for piece, host in ahead(staging, torch.split(flat, _PIECE)):
        staging.back(host, piece)
    staging.join()
