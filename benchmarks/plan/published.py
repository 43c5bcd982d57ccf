"""Streaming DiLoCo's simulated link rates (arXiv 2501.18512, table 4), and those that ftopt's model of a link needs.

The paper's simulation is a graph of layers: forward, backward with respect to activations and to parameters, all of
equal length here, and a layer's reduction, which begins when its gradients are there and is needed by the same layer's
next forward pass (``tau`` steps later with overlap). Fragments have 3 layers, strided, and H is 100. The paper names
neither the bits of a parameter nor the rates it tried. All its values are, within 0.06, on a grid of 50 rates from 0.1
to 1,000 Gbit/s; `rows` assumes 16 bits (4 with FP4), and takes the last rate of the grid that is not enough: then 62 of
the 75 values are the same, and the others one step of the grid (a factor of 1.21) off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.speed.figures import Row
from ftopt.forecast.timeline import Transfer, play

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID = tuple(10 ** (4 * number / 49 - 1) for number in range(50))
BITS, FP4_BITS = 16.0, 4.0
EVERY, LAYERS_OF_A_FRAGMENT = 100, 3


@dataclass(frozen=True)
class Size:
    """A model of the table."""

    name: str
    parameters: float
    layers: int
    step_s: float


@dataclass(frozen=True)
class Way:
    """A method of the table: ``fragments`` or the whole model, every so many steps; ``delay``: the paper's tau."""

    name: str
    every: int
    fragments: bool = False
    delay: int = 0
    bits: float = BITS


SIZES = (Size("1B", 1e9, 24, 0.1), Size("10B", 1e10, 48, 0.8), Size("100B", 1e11, 108, 4.9))
WAYS = (
    Way("data-parallel", 1),
    Way("DiLoCo", EVERY),
    Way("Streaming", EVERY, True),
    Way("+ overlap", EVERY, True, 1),
    Way("+ FP4", EVERY, True, 1, FP4_BITS),
)
PUBLISHED = {
    "1B": (
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    "10B": (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    "100B": (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}
"""Size -> way -> Gbit/s for `LEVELS`."""


def transfers(size: Size, way: Way, gbit_s: float) -> tuple[float, list[Transfer]]:
    """A period's computation in seconds, and what is sent in it: layer by layer."""
    node_s = size.step_s / (3 * size.layers)
    period_s = way.every * size.step_s
    parts = size.layers // LAYERS_OF_A_FRAGMENT if way.fragments else 1
    link_s = size.parameters * way.bits / size.layers / (gbit_s * 1e9)
    found = []
    for layer in reversed(range(size.layers)):  # as the backward pass comes to them
        step = math.ceil((layer % parts + 1) * way.every / parts) - 1
        at_s = step * size.step_s + (size.layers + 2 * (size.layers - layer)) * node_s
        needed_s = (step + 1 + way.delay) * size.step_s + layer * node_s
        periods = int(at_s // period_s)  # 1: at the end of the period, which is the beginning of the next one
        found.append(Transfer(at_s - periods * period_s, needed_s - periods * period_s, link_s))
    return period_s, found


def needed(size: Size, way: Way, level: float) -> float:
    """Gbit/s for a compute utilization of ``level``, to one part in a thousand, by bisection."""

    def is_enough(gbit_s: float) -> bool:
        period_s, sent = transfers(size, way, gbit_s)
        return period_s / play(period_s, sent).wall_s >= level

    low, high = 0.01, 10_000.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def on_grid(gbit_s: float) -> float:
    """The last rate of the grid that is not enough."""
    return max((rate for rate in GRID if rate < gbit_s), default=GRID[0])


def rows() -> list[Row]:
    """What is published, what is ours if that is another rate of the grid, and what is needed exactly."""
    found: list[Row] = []
    for size in SIZES:
        for way, published in zip(WAYS, PUBLISHED[size.name], strict=True):
            row: Row = {"parameters": size.name, "way": way.name}
            for level, theirs in zip(LEVELS, published, strict=True):
                ours = needed(size, way, level)
                same = on_grid(ours) == min(GRID, key=lambda rate: abs(rate - theirs))
                row[f"{level:.0%}"] = f"{theirs:g}{'' if same else f' / {on_grid(ours):.1f}'} ({ours:.3g})"
            found.append(row)
    return found
