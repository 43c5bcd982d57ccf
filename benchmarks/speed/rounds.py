"""Outer steps of a job of a few processes, timed: what `codec` and `scale` compare."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import ftopt
from benchmarks.speed.crew import coordinator, together
from benchmarks.speed.models import of_size

PATIENT = ftopt.Sync(dead_after_s=60.0, grace_s=60.0)
"""Nobody is called in early, and a slow network is no dead one."""


def timed(
    size: int,
    parameters: int,
    repetitions: int,
    *,
    fragments: int = 1,
    codecs: Sequence[str] = ("fp32",),
    hosts: Sequence[tuple[str, str]] = (),
) -> dict[str, list[float]]:
    """Seconds of outer steps of all fragments at once by codec, the slowest replica's, in turns.

    Args:
        size: replicas.
        parameters: of the model.
        repetitions: of each codec.
        fragments: equal parts of the model.
        codecs: recipes' words.
        hosts: (network namespace, address) of the coordinator and of each replica. Default: loopback.
    """
    spaces, addresses = [list(x) for x in zip(*hosts, strict=True)] if hosts else ([], ["127.0.0.1"] * (size + 1))
    with tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder:
        prefix = ("ip", "netns", "exec", spaces[0]) if spaces else ()
        with coordinator(Path(folder), host=addresses[0], prefix=prefix) as url:
            arguments = (parameters, repetitions, fragments, tuple(codecs), url, tuple(addresses[1:]))
            of_ranks = together(_replica, size, *arguments, namespaces=spaces[1:] or None)
    return {codec: [max(t) for t in zip(*(r[codec] for r in of_ranks), strict=True)] for codec in codecs}


def _replica(
    rank: int,
    size: int,
    parameters: int,
    repetitions: int,
    fragments: int,
    codecs: tuple[str, ...],
    url: str,
    addresses: tuple[str, ...],
) -> dict[str, list[float]]:
    method = ftopt.StreamingDiLoCo(sync_every=10**6, delay=0, fragments=ftopt.Balanced(n=fragments))
    found: dict[str, list[float]] = {}
    for codec in codecs:  # one job after the other: each starts and ends together
        model = of_size(parameters, tensors=max(16, fragments))
        sync = ftopt.Sync(**{**vars(PATIENT), "start_replicas": size, "codec": codec})
        group = ftopt.connect(url, f"r{rank}", job=codec.replace(":", "-"), sync=sync, host=addresses[rank])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with ftopt.wrap(inner, model, method, group=group) as optimizer:
            taken = [_round_s(optimizer, model) for _ in range(2 + repetitions)]
        found[codec] = taken[2:]
    return found


def _round_s(optimizer: ftopt.OuterOptimizer, model: torch.nn.Module) -> float:
    """Seconds of one, of replicas that come at the same time: the round before has ended for all together."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(()) * 1e-3)
    optimizer.step()
    start = time.perf_counter()
    while not optimizer.sync():
        pass
    return time.perf_counter() - start
