"""Outer steps of a job of a few processes, timed: what `codec` and `scale` compare."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import ftopt
from benchmarks.speed.crew import coordinator, together
from benchmarks.speed.figures import in_turns
from benchmarks.speed.models import of_size

PATIENT = ftopt.FaultPolicy(dead_after_s=60.0, grace_s=60.0)
"""Nobody is called in early, and a slow network is no dead one."""

Way = tuple[str, int]
"""A recipe's word for a codec, and into how many equal parts the model is cut."""


def timed(
    size: int, parameters: int, repetitions: int, ways: Sequence[Way], *, hosts: Sequence[tuple[str, str]] = ()
) -> Mapping[Way, list[float]]:
    """Seconds of outer steps of all fragments at once, the slowest replica's, by way, in turns.

    Args:
        size: replicas.
        parameters: of the model.
        repetitions: of each way.
        ways: what is compared, a job each.
        hosts: (network namespace, address) of the coordinator and of each replica. Default: loopback.
    """
    spaces, addresses = [list(x) for x in zip(*hosts, strict=True)] if hosts else ([], ["127.0.0.1"] * (size + 1))
    with tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder:
        prefix = ("ip", "netns", "exec", spaces[0]) if spaces else ()
        with coordinator(Path(folder), host=addresses[0], prefix=prefix) as url:
            arguments = (parameters, repetitions, tuple(ways), url, tuple(addresses[1:]))
            of_ranks = together(_replica, size, *arguments, namespaces=spaces[1:] or None)
    return {way: [max(t) for t in zip(*(r[way] for r in of_ranks), strict=True)] for way in ways}


def _replica(
    rank: int, size: int, parameters: int, repetitions: int, ways: tuple[Way, ...], url: str, addresses: tuple[str, ...]
) -> dict[Way, list[float]]:
    works = {}
    with ExitStack() as stack:
        for number, (codec, fragments) in enumerate(ways):
            method = ftopt.StreamingDiLoCo(
                sync_every=10**6, delay=0, fragments=ftopt.fragments.Balanced(n=fragments), codec=codec
            )
            model = of_size(parameters, tensors=max(16, fragments))
            policy = replace(PATIENT, start_replicas=size)
            group = ftopt.connect(url, f"r{rank}", job=f"way-{number}", policy=policy, host=addresses[rank])
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = stack.enter_context(ftopt.wrap(inner, model, method, group=group))
            works[codec, fragments] = partial(_round_s, optimizer, model)
        return in_turns(works, repetitions)


def _round_s(optimizer: ftopt.ReplicaOptimizer, model: torch.nn.Module) -> float:
    """Seconds of one, of replicas that come at the same time: the round before has ended for all together."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(()) * 1e-3)
    optimizer.step()
    start = time.perf_counter()
    while not optimizer.sync():
        pass
    return time.perf_counter() - start
