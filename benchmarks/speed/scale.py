"""How the cost of an outer step grows: with parameters, replicas and fragments."""

from __future__ import annotations

from benchmarks.speed.figures import Row, Spread
from benchmarks.speed.rounds import timed

ABOUT = (
    "One outer step of all fragments at once (streaming DiLoCo, fp32, no delay), loopback, one torch thread a process. "
    "With parameters it should grow in proportion, beyond a constant; with fragments of the same bytes in all not at "
    "all. More replicas than cores share them."
)
GOALS = {"64 fragments / 1": 1.5}
DRAWN = "ms"
MILLION = 1_000_000


def run(quick: bool) -> list[Row]:
    """A row a point: one of the three numbers moves, the others stay."""
    repetitions = 5 if quick else 7
    points = [("parameters", 2, n, 1) for n in ((1, 10) if quick else (1, 3, 10, 30, 100))]
    points += [("replicas", n, 1, 1) for n in ((4,) if quick else (2, 4, 8, 16))]
    points += [("fragments", 2, 10, n) for n in ((16,) if quick else (1, 4, 16, 64))]
    rows = []
    for what, replicas, millions, fragments in points:
        taken = timed(replicas, millions * MILLION, repetitions, fragments=fragments)["fp32"]
        ms = Spread.of([1000 * t for t in taken])
        rows.append(
            {
                "over": what,
                "parameters": f"{millions}M",
                "replicas": replicas,
                "fragments": fragments,
                "ms": ms,
                "ns a parameter": ms.median / millions,
            }
        )
    return rows
