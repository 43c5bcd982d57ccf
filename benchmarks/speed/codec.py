"""What the codecs save and cost: bytes, arithmetic, and whole outer steps on networks of several speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from benchmarks.codecs import best_s
from benchmarks.speed.figures import Row, Spread, ratio
from benchmarks.speed.rounds import timed
from ftopt.codecs import codec_named
from tests.network.hosts import hosts

ABOUT = (
    "Bytes on the wire and GB/s of fp32 input a core (CPU time, the best of 9, 16 million values), and whole outer "
    "steps of 2 replicas: on loopback, and between network namespaces on links of 1 Gbit/s and 100 Mbit/s (`tc tbf`). "
    "Times are to those of fp32 on the same network."
)
GOALS = {"fp4: bytes": 1 / 7.5, "any codec from 1 Gbit/s down: to fp32": 1.0}
DRAWN = "100 Mbit/s, to fp32"
CODECS = ("fp32", "bf16", "int8", "fp4", "top_k:0.03:2")
_MBIT = {"1 Gbit/s": 1000, "100 Mbit/s": 100}


def run(quick: bool) -> list[Row]:
    """A row a codec."""
    parameters, repetitions = (1_000_000, 5) if quick else (10_000_000, 7)
    on = {"loopback": timed(2, parameters, repetitions, codecs=CODECS)}
    for name, mbit in _MBIT.items():
        with _network(mbit) as places:
            on[name] = timed(2, parameters, repetitions, codecs=CODECS, hosts=places) if places else {}
    return [_row(codec, on, elements=1_000_000 if quick else 16_000_000) for codec in CODECS]


def _row(spec: str, on: dict[str, dict[str, list[float]]], *, elements: int) -> Row:
    codec = codec_named(spec)
    torch.set_num_threads(1)
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    out, encoded = torch.empty_like(x), codec.encode(x)
    works: Sequence[Callable[[], object]] = (partial(codec.encode, x), partial(codec.decode, encoded, out))
    speeds = [4e-9 * elements / best_s(work, time.thread_time, 9) for work in works]
    row: Row = {"codec": spec, "times fewer bytes": 4 * elements / codec.encoded_bytes(elements)}
    for what, speed in zip(("encode GB/s", "decode GB/s"), speeds, strict=True):
        row[what] = speed if speed < 1000 else "free"
    for name, taken in on.items():
        row[f"{name}, ms"] = Spread.of([1000 * t for t in taken[spec]]).median if taken else None
        row[f"{name}, to fp32"] = ratio(taken[spec], taken["fp32"]) if taken else None
    return row


@contextmanager
def _network(mbit: int) -> Iterator[list[tuple[str, str]]]:
    """Namespaces and addresses of a coordinator and two replicas; none where the machine allows no namespaces."""
    names = ["head", "r0", "r1"]
    try:
        with hosts(names) as made:
            for name in names[1:]:
                made.rate(name, mbit)
            yield [(made.namespace(name), made.address(name)) for name in names]
    except pytest.skip.Exception:
        yield []
