"""What the codecs save and cost: bytes, arithmetic, and whole outer steps on networks of several speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from benchmarks.codecs import best_s, load_kernels
from benchmarks.speed.figures import FEWER_REPETITIONS, QUICK_REPETITIONS, Row, Spread, ratio
from benchmarks.speed.links import NoLinksError, namespaces
from benchmarks.speed.rounds import Way, timed
from ftopt.codecs import codec_named

ABOUT = (
    "Bytes on the wire and GB/s of fp32 input per core (CPU time, the best of 9, 16 million values; fp32 is not "
    "encoded), and whole outer steps of 2 replicas with 10M parameters: on loopback, and between network namespaces "
    "on links of 1 Gbit/s and 100 Mbit/s (`tc tbf`). Times are relative to fp32 on the same network, in turns. *to "
    "its bytes*: relative to the time that the bytes alone take on such a link."
)
GOALS = (
    "fp4: >= 7.5 times fewer bytes; any codec from 1 Gbit/s down, to fp32 < 1; fp4 at 100 Mbit/s, to its bytes <= "
    "1.15; encode, decode >= 2 GB/s"
)
DRAWN = "100 Mbit/s, to fp32"
CODECS = ("fp32", "bf16", "int8", "fp4", "top_k:0.03:2")
_MBIT = {"1 Gbit/s": 1000, "100 Mbit/s": 100}
_WAYS: Sequence[Way] = [(codec, 1) for codec in CODECS]


def run(quick: bool) -> list[Row]:
    """A row a codec; without the limited networks where the machine has no namespaces for us."""
    parameters, repetitions, elements = (
        (500_000, QUICK_REPETITIONS, 1_000_000) if quick else (10_000_000, FEWER_REPETITIONS, 16_000_000)
    )
    on = {"loopback": timed(2, parameters, repetitions, _WAYS)}
    names = ["head", "r0", "r1"]
    for name, mbit in list(_MBIT.items())[1 if quick else 0 :]:
        try:
            with namespaces(names) as net:
                for replica in names[1:]:
                    net.rate(replica, mbit)
                hosts = [(net.namespace(each), net.address(each)) for each in names]
                on[name] = timed(2, parameters, repetitions, _WAYS, hosts=hosts)
        except NoLinksError:
            on[name] = {}
    return [_row(codec, on, parameters=parameters, elements=elements) for codec in CODECS]


def _row(spec: str, on: Mapping[str, Mapping[Way, list[float]]], *, parameters: int, elements: int) -> Row:
    codec = codec_named(spec)
    torch.set_num_threads(1)
    load_kernels()
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    out, encoded = torch.empty_like(x), codec.encode(x)
    works: Sequence[Callable[[], object]] = (partial(codec.encode, x), partial(codec.decode, encoded, out))
    speeds = [4e-9 * elements / best_s(work, time.thread_time, 9) for work in works]
    row: Row = {"codec": spec, "times fewer bytes": 4 * elements / codec.encoded_bytes(elements)}
    for what, speed in zip(("encode GB/s", "decode GB/s"), speeds, strict=True):
        row[what] = speed if speed < 1000 else None  # nothing is done
    for name, found in on.items():
        taken, fp32 = found.get((spec, 1)), found.get(("fp32", 1))
        row[f"{name}, ms"] = Spread.of([1000 * t for t in taken]).median if taken else None
        row[f"{name}, to fp32"] = ratio(taken, fp32) if taken and fp32 else None
        if name in _MBIT:
            wire_s = 8e-6 * codec.encoded_bytes(parameters) / _MBIT[name]
            row[f"{name}, to its bytes"] = Spread.of(taken).median / wire_s if taken else None
    return row
