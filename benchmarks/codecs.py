"""How fast each codec is on one core, and how many bytes it takes: the figures of ``docs/methods.md``.

Speed is bytes of fp32 per second of this thread's CPU time, the best of some repetitions, on normally distributed
values; by kernels, where numba is installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from ftopt.cli.shared.output import say
from ftopt.codecs import codec_named
from ftopt.codecs.named import prepare_kernels

SPECS = ("fp32", "bf16", "int8", "fp4", "top_k:0.01:4", "top_k:0.03:2", "top_k:0.1:8")
MILLION = 1_000_000


def add(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "--codec", action="append", help="a recipe's word for one; may be given again (default: a choice)"
    )
    parser.add_argument("--elements", type=int, default=16 * MILLION, help="of the payload (default 16 million)")
    parser.add_argument("--repeat", type=int, default=9, help="the best of so many counts (default 9)")
    parser.add_argument("--torch", action="store_true", help="without kernels")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda; there it is wall time")


def run(arguments: argparse.Namespace) -> int:
    """Prints a table."""
    torch.set_num_threads(1)
    if not arguments.torch:
        load_kernels()
    clock = time.thread_time if arguments.device == "cpu" else time.perf_counter
    x = torch.randn(arguments.elements, generator=torch.Generator().manual_seed(0)).to(arguments.device)
    out = torch.empty_like(x)
    say("| codec | bits per value | bytes for 1M values | times fewer | encode GB/s | decode GB/s |")
    say("|---|---|---|---|---|---|")
    for spec in arguments.codec or SPECS:
        codec = codec_named(spec)
        encoded = codec.encode(x)
        works = (partial(codec.encode, x), partial(codec.decode, encoded, out))
        taken = [4e-9 * x.numel() / best_s(work, clock, arguments.repeat) for work in works]
        speeds = [f"{speed:.1f}" if speed < 1000 else "free" for speed in taken]
        size = codec.encoded_bytes(MILLION)
        cells = [f"`{spec}`", f"{8 * size / MILLION:.2f}", f"{size:,}", f"{4 * MILLION / size:.2f}", *speeds]
        say(f"| {' | '.join(cells)} |")
    return 0


def load_kernels() -> None:
    """Waits until codecs use kernels, where they can."""
    loading = prepare_kernels(torch.device("cpu"), 16 * MILLION)
    if loading is not None:
        loading.join()


def best_s(work: Callable[[], object], clock: Callable[[], float], repeat: int) -> float:
    """Seconds that ``work`` takes at best."""
    best = float("inf")
    for _ in range(repeat):
        start = clock()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return best
