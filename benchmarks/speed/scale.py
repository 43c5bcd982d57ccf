"""How the cost of an outer step grows: with parameters, replicas and fragments."""

from __future__ import annotations

from pathlib import Path

from benchmarks import pictures
from benchmarks.speed.figures import FEWER_REPETITIONS, QUICK_REPETITIONS, Row, Spread, ratio
from benchmarks.speed.rounds import timed

ABOUT = (
    "One outer step of all fragments at once (Streaming DiLoCo, fp32, no delay), loopback, one torch thread per "
    "process. The time should be proportional to the parameters, beyond a constant, and independent of the number of "
    "fragments for the same total bytes: these are measured in turns, and *to the first* is relative to one fragment. "
    "Replicas share the cores when there are more of them. Sizes that do not fit into memory are left out."
)
GOALS = "ns per parameter constant from 10M on; 64 fragments to the first <= 1.5"
MILLION = 1_000_000
_SCALES: dict[str, pictures.Scale] = {"parameters": "log", "replicas": "linear", "fragments": "log"}
_COPIES = 10
"""Of the parameters that a replica holds (the benchmark of memory), with some room."""


def run(quick: bool) -> list[Row]:
    """A row a point: one of the three numbers moves, the others stay."""
    rows: list[Row] = []
    for millions in (1, 10) if quick else (1, 3, 10, 50, 200):
        if 2 * _COPIES * 4 * millions * MILLION < _available():
            rows += _measure("parameters", 2, millions, (1,), quick=quick)
    for replicas in (4,) if quick else (2, 4, 8, 16):
        rows += _measure("replicas", replicas, 1, (1,), quick=quick)
    return rows + _measure("fragments", 2, 1 if quick else 10, (1, 16) if quick else (1, 4, 16, 64), quick=quick)


def _measure(over: str, replicas: int, millions: int, cuts: tuple[int, ...], *, quick: bool) -> list[Row]:
    found = timed(
        replicas, millions * MILLION, QUICK_REPETITIONS if quick else FEWER_REPETITIONS, [("fp32", cut) for cut in cuts]
    )
    first = found["fp32", cuts[0]]
    rows: list[Row] = []
    for cut in cuts:
        taken = found["fp32", cut]
        ms = Spread.of([1000 * t for t in taken])
        row: Row = {"over": over, "parameters": f"{millions}M", "replicas": replicas, "fragments": cut, "ms": ms}
        row["ns a parameter"] = ms.median / millions
        rows.append(row | {"to the first": ratio(taken, first) if len(cuts) > 1 else None})
    return rows


def draw(rows: list[Row], path: Path) -> None:
    """A panel for each of the three numbers."""
    panels = []
    for over, scale in _SCALES.items():
        points = [
            (float(str(row[over]).rstrip("M")), row["ns a parameter"] if over == "parameters" else row["ms"].median)
            for row in rows
            if row["over"] == over
        ]
        x, y = ("parameters, millions", "ns a parameter") if over == "parameters" else (over, "ms")
        panels.append(pictures.Panel(curves={"an outer step": points}, x=x, y=y, scale=scale, least=0.0))
    pictures.lines(panels, path)


def _available() -> int:
    """Bytes of memory that can be had."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
