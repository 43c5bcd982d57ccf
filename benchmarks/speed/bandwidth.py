"""How fast a link must be: compute utilization against the link's rate, method by method."""

from __future__ import annotations

import itertools
import math
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

import ftopt
from benchmarks.speed.crew import coordinator
from benchmarks.speed.figures import QUICK_REPETITIONS, Row, Spread
from benchmarks.speed.linked import DELAY, EVERY, FRAGMENTS, WAYS
from benchmarks.speed.orders import Crew, crew
from ftopt.codecs import codec_named
from tests.network.hosts import hosts

ABOUT = (
    "Two replicas in network namespaces, each behind a link of the given rate (`tc tbf`); an inner step is a wait of "
    "20 ms; a round every 20 steps, 4 fragments, a delay of 4 steps. Compute utilization: the time in inner steps by "
    "all the time. *ideal*: the same bytes at that rate with nothing else to pay for, as in the simulation of "
    "Streaming DiLoCo (arXiv 2501.18512): a reduction keeps the trainer for bytes / rate, less what the delay hides. "
    "*90 %*: the least rate for 90 % (interpolated)."
)
GOALS = {"ideal / measured": 1.1, "rate of + fp4 / rate of DiLoCo, for 90 %": 0.1}
DRAWN = "to its ideal"
STEP_S = 0.02
_PATIENT = ftopt.Sync(start_replicas=2, dead_after_s=60.0, grace_s=60.0, heartbeat_s=1.0)
_ENOUGH = 0.9


def run(quick: bool) -> list[Row]:
    """A row a method and rate; one that says so where the machine has no namespaces for us."""
    parameters = 250_000 if quick else 1_000_000
    rates = (20, 200) if quick else (3, 10, 30, 100, 300, 1000)
    try:
        found = _measure(parameters, rates, 3 if quick else QUICK_REPETITIONS)
    except pytest.skip.Exception as reason:
        return [{"way": f"not measured: {reason}", DRAWN: None}]
    rows: list[Row] = []
    for way in WAYS:
        needed = _rate_for(_ENOUGH, {rate: found[way, rate].median for rate in rates})
        for rate in rates:
            ideal, used = _ideal(way, parameters, rate), found[way, rate]
            row: Row = {"way": way, "Mbit/s": rate, "utilization": used, "ideal": ideal, DRAWN: used.median / ideal}
            rows.append({**row, "90 %, Mbit/s": needed})
    return rows


def _measure(parameters: int, rates: tuple[int, ...], periods: int) -> dict[tuple[str, int], Spread]:
    names = ("head", "r0", "r1")
    found: dict[tuple[str, int], Spread] = {}
    with ExitStack() as stack:
        net = stack.enter_context(hosts(names))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
        prefixes = [("ip", "netns", "exec", net.namespace(name)) for name in names]
        url = stack.enter_context(coordinator(folder, host=net.address("head"), prefix=prefixes[0]))
        told = {"url": url, "parameters": parameters, "step_s": STEP_S, "sync": asdict(_PATIENT)}
        each = [told | {"replica": name, "host": net.address(name)} for name in names[1:]]
        members = stack.enter_context(crew("benchmarks.speed.linked", each, prefixes=prefixes[1:]))
        for number in range(len(WAYS)):
            members.all(f"run {number} 2")
        for rate in rates:
            for name in names[1:]:
                net.rate(name, rate)
            for number, way in enumerate(WAYS):
                found[way, rate] = _utilization(members, number, periods)
    return found


def _utilization(members: Crew, number: int, periods: int) -> Spread:
    """The slower one's, by period; the first one is thrown away."""
    of_members = members.all(f"run {number} {periods + 1}")
    used = [[computed_s / all_s for computed_s, all_s in times[1:]] for times in of_members]
    return Spread.of([min(each) for each in zip(*used, strict=True)])


def _ideal(way: str, parameters: int, mbit: int) -> float:
    """Of two replicas, that send all they have once each round."""
    codec = codec_named("fp4" if way == "+ fp4" else "fp32")
    parts = 1 if way in ("SyncSGD", "DiLoCo") else FRAGMENTS
    reduction_s = 8 * codec.encoded_bytes(parameters // parts) / (mbit * 1e6)
    hidden_s = DELAY * STEP_S if way.startswith("+") else 0.0
    compute_s = STEP_S * (1 if way == "SyncSGD" else EVERY)
    return compute_s / (compute_s + parts * max(0.0, reduction_s - hidden_s))


def _rate_for(share: float, utilization: dict[int, float]) -> float | None:
    """The least rate (Mbit/s) for that utilization, on a line through the logarithms of those around it."""
    rates = sorted(utilization)
    for low, high in itertools.pairwise(rates):
        a, b = utilization[low], utilization[high]
        if a < share <= b:
            return math.exp(math.log(low) + (share - a) / (b - a) * math.log(high / low))
    return float(rates[0]) if utilization[rates[0]] >= share else None
