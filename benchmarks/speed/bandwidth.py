"""How fast a link must be: compute utilization against the link's rate, method by method."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import ftopt
from benchmarks import pictures
from benchmarks.speed.figures import FEWER_REPETITIONS, QUICK_REPETITIONS, Row, Spread
from benchmarks.speed.linked import DELAY, EVERY, FRAGMENTS, WAYS
from benchmarks.speed.links import linked
from benchmarks.speed.orders import Crew
from ftopt.codecs import codec_named

STEP_S = 0.03
RATES = (3, 10, 30, 100, 300, 1000, 3000)
ABOUT = (
    "Two replicas in network namespaces, each behind a link of the given rate (`tc tbf`), 1M parameters; an inner step "
    f"is a wait of {1000 * STEP_S:g} ms; a round every {EVERY} steps, {FRAGMENTS} fragments, a delay of {DELAY} steps. "
    "Compute utilization: the share of time spent in inner steps. *ideal*: the same bytes at that rate with no other "
    "cost, as in the simulation of Streaming DiLoCo (arXiv 2501.18512): a reduction blocks the trainer for "
    "bytes / rate, less what the delay hides. With a delay ftopt may exceed it: a late result is not waited for "
    "before the next round. *90 %*: the lowest rate for 90 %, interpolated. Left out: rates at which the ideal is "
    "below a fifth."
)
GOALS = "to its ideal >= 0.9; the rate for 90 % of + fp4 <= a tenth of that of DiLoCo"
_PATIENT = ftopt.FaultPolicy(start_replicas=2, dead_after_s=60.0, grace_s=60.0, heartbeat_s=1.0)
_ENOUGH = 0.9
_WORTH = 0.2


def run(quick: bool) -> list[Row]:
    """A row a method and rate."""
    if quick:
        return _measure((30, 300), 250_000, 0.01, QUICK_REPETITIONS)
    return _measure(RATES, 1_000_000, STEP_S, FEWER_REPETITIONS)


def _measure(rates: tuple[int, ...], parameters: int, step_s: float, periods: int) -> list[Row]:
    ideals = {(way, rate): ideal(way, parameters, rate, step_s) for way in WAYS for rate in rates}
    found: dict[tuple[str, int], Spread] = {}
    told = {"parameters": parameters, "step_s": step_s, "policy": asdict(_PATIENT)}
    with linked("benchmarks.speed.linked", 2, told) as links:
        for number in range(len(WAYS)):
            links.crew.all(f"run {number} 2")
        for rate in rates:
            links.rate(rate)
            for number, way in enumerate(WAYS):
                if ideals[way, rate] >= _WORTH:
                    found[way, rate] = _utilization(links.crew, number, periods)
    rows: list[Row] = []
    for way in WAYS:
        used = {rate: spread for (other, rate), spread in found.items() if other == way}
        needed = rate_for(_ENOUGH, {rate: spread.median for rate, spread in used.items()})
        for rate, spread in used.items():
            best = ideals[way, rate]
            row: Row = {"way": way, "Mbit/s": rate, "utilization": spread, "ideal": best}
            rows.append({**row, "to its ideal": spread.median / best, "90 %, Mbit/s": needed})
    return rows


def _utilization(members: Crew, number: int, periods: int) -> Spread:
    """The slower one's, by period; the first one is thrown away."""
    of_members = members.all(f"run {number} {periods + 1}")
    used = [[computed_s / all_s for computed_s, all_s in times[1:]] for times in of_members]
    return Spread.of([min(each) for each in zip(*used, strict=True)])


def ideal(way: str, parameters: int, mbit: int, step_s: float = STEP_S) -> float:
    """Of two replicas, that send all they have once each round."""
    codec = codec_named("fp4" if way == "+ fp4" else "fp32")
    parts = 1 if way in ("SyncSGD", "DiLoCo") else FRAGMENTS
    reduction_s = 8 * codec.encoded_bytes(parameters // parts) / (mbit * 1e6)
    hidden_s = DELAY * step_s if way.startswith("+") else 0.0
    compute_s = step_s * (1 if way == "SyncSGD" else EVERY)
    return compute_s / (compute_s + parts * max(0.0, reduction_s - hidden_s))


def rate_for(share: float, utilization: Mapping[int, float]) -> float | None:
    """The least rate (Mbit/s) for that utilization, on a line through the logarithms of those around it."""
    rates = sorted(utilization)
    for low, high in itertools.pairwise(rates):
        a, b = utilization[low], utilization[high]
        if a < share <= b:
            return math.exp(math.log(low) + (share - a) / (b - a) * math.log(high / low))
    return float(rates[0]) if rates and utilization[rates[0]] >= share else None


def draw(rows: list[Row], path: Path) -> None:
    """Measured, and dotted the ideal."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["way"], []).append((row["Mbit/s"], row["utilization"].median))
        curves.setdefault(f"_{row['way']}", []).append((row["Mbit/s"], row["ideal"]))
    y = "compute utilization (dotted: ideal)"
    pictures.lines([pictures.Panel(curves=curves, x="link, Mbit/s", y=y, scale="log", least=0.0)], path)
