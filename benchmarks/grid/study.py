"""A published study of short runs, beside the same settings here: ``python -m benchmarks grid --study``.

A character GPT of 0.8 million parameters, 4 replicas, 750 steps, AdamW inside, one seed, found by a search of public
repositories in November 2026: 1.600 for exchanging each gradient. Here: the byte GPT of the grid, at its best AdamW
rate, three seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.grid.loop import Point
from benchmarks.grid.points import RATE, Losses

STEPS, BASE = 750, 1.600
PUBLISHED = {
    (25, 0.7, 0.9): 1.783, (25, 1.0, 0.0): 1.721, (25, 1.0, 0.5): 1.671,
    (5, 0.7, 0.9): 2.138, (5, 1.0, 0.0): 1.667, (5, 1.0, 0.5): 1.782,
}  # fmt: skip
"""Period, outer rate, momentum -> the published loss."""


def points(seeds: int) -> Iterator[Point]:
    """The runs, for so many seeds."""
    for seed in range(seeds):
        yield Point(kind="sync", rate=RATE, steps=STEPS, seed=seed)
        for h, eta, mu in PUBLISHED:
            yield Point(kind="diloco", rate=RATE, steps=STEPS, seed=seed, h=h, eta=eta, mu=mu)


def table(losses: Losses, seeds: int) -> list[str]:
    """Its lines; none if a run is missing."""
    made = list(points(seeds))
    if any(point not in losses for point in made):
        return []
    base = {point.seed: losses[point] for point in made if point.kind == "sync"}
    lines = ["", "| H | outer rate, momentum | published | here |", "|---|---|---|---|"]
    for (h, eta, mu), loss in PUBLISHED.items():
        gaps = [losses[x] / base[x.seed] - 1 for x in made if (x.h, x.eta, x.mu) == (h, eta, mu) and x.kind == "diloco"]
        spread = 100 * (max(gaps) - min(gaps)) / 2
        here = f"{statistics.median(gaps):+.1%} ±{spread:.1f}"
        lines.append(f"| {h} | {eta:g}, {mu:g} | {loss / BASE - 1:+.1%} | {here} |")
    return lines
