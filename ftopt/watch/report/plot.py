"""Pictures without a library: an SVG that stretches to the width of the page, with labels that are HTML around it.

The SVG holds shapes alone, in a box of `WIDTH` units that is stretched (``preserveAspectRatio="none"``, strokes are
not), so that labels keep their size on a phone and on paper. A dot is a line of length 0 with round ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftopt.watch.report.html import Html, el
from ftopt.watch.report.text import clock, span

WIDTH = 1000
Point = tuple[float, float]

_CLOCK_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


@dataclass(frozen=True, slots=True)
class Axis:
    """From ``least`` to ``most``; ``ticks`` are (value, label)."""

    least: float
    most: float
    ticks: Sequence[tuple[float, str]]

    def part(self, value: float) -> float:
        """Where a value is, 0 to 1; what is beyond an end is at that end."""
        if self.most <= self.least:
            return 0.5
        return min(1.0, max(0.0, (value - self.least) / (self.most - self.least)))


def axis(least: float, most: float, *, ticks: int = 5) -> Axis:
    """Of plain numbers, with round ticks."""
    if not most > least:
        least, most = least - 0.5, least + 0.5
    step = _round_up((most - least) / ticks, 10.0 ** math.floor(math.log10((most - least) / ticks)))
    return Axis(least, most, [(value, f"{value:,.10g}") for value in _multiples(least, most, step)])


def times(least: float, most: float, *, ticks: int = 6) -> Axis:
    """Of seconds since a run's start, labelled as a clock."""
    if most - least < ticks:
        return _with_unit(axis(least, max(most, least + 0.1), ticks=ticks), " s")
    rough = (most - least) / ticks
    step = next((step for step in _CLOCK_STEPS_S if step >= rough), 86400 * math.ceil(rough / 86400))
    return Axis(least, most, [(value, clock(value)) for value in _multiples(least, most, float(step))])


def durations(most: float, *, ticks: int = 4) -> Axis:
    """Of seconds, from 0."""
    plain = axis(0.0, most or 1.0, ticks=ticks)
    return Axis(plain.least, plain.most, [(value, span(value)) for value, _ in plain.ticks])


class Plot:
    """Shapes in a pair of axes.

    Args:
        x, y: the axes; without ``y`` shapes are placed by their parts of the height.
        height: in pixels.
    """

    def __init__(self, x: Axis, y: Axis | None = None, *, height: int = 240) -> None:
        self._x, self._y, self._height = x, y, height
        self._shapes: list[Html] = []

    def line(self, points: Sequence[Point], kind: str, title: str) -> None:
        """Through the points; ``kind`` is a class of the style sheet."""
        if len(points) == 1:
            self.dots(points, kind, title)
        elif points:
            self._path("M" + "L".join(self._at(x, y) for x, y in points), f"line {kind}", title)

    def dots(self, points: Iterable[Point], kind: str, title: str) -> None:
        """A dot at each point."""
        self._path("".join(f"M{self._at(x, y)}h0" for x, y in points), f"dot {kind}", title)

    def blocks(self, spans: Iterable[tuple[float, float]], top: float, bottom: float, kind: str, title: str) -> None:
        """Filled from one moment to another, between two parts of the height."""
        high, low = round(top * self._height, 1), round((bottom - top) * self._height, 1)
        parts = []
        for start, stop in spans:
            left, right = self._left(start), self._left(stop)
            width = max(0.1, right - left)
            parts.append(f"M{left:.6g} {high:g}h{width:.6g}v{low:g}h{-width:.6g}z")
        self._path("".join(parts), f"block {kind}", title)

    def marks(self, moments: Iterable[float], top: float, bottom: float, kind: str, title: str) -> None:
        """Upright strokes; those that would fall on each other are one."""
        high, low = round(top * self._height, 1), round((bottom - top) * self._height, 1)
        places = sorted({round(self._left(moment), 1) for moment in moments})
        self._path("".join(f"M{place:g} {high:g}v{low:g}" for place in places), f"mark {kind}", title)

    def html(self, label: str, *, rows: Sequence[object] = ()) -> Html:
        """The picture.

        Args:
            label: what it shows, for those who do not see it.
            rows: labels left of it, each in the middle of an equal part of the height, in the place of ``y``'s ticks.
        """
        shapes = [*self._grid(), *self._shapes]
        box = f"0 0 {WIDTH} {self._height}"
        svg = el("svg", shapes, viewBox=box, preserveAspectRatio="none", role="img", aria_label=label)
        ticks = self._y.ticks if self._y is not None else []
        left = [el("span", text, style=f"top:{100 * (1 - self._up(at)):.2f}%") for at, text in ticks]
        left += [el("span", row, style=f"top:{100 * (n + 0.5) / len(rows):.2f}%") for n, row in enumerate(rows)]
        below = [el("span", text, style=f"left:{100 * self._x.part(at):.2f}%") for at, text in self._x.ticks]
        widest = max((len(str(text)) for text in (*rows, *(text for _, text in ticks))), default=0)
        return el(
            "div",
            el("div", left, class_="y"),
            el("div", svg, class_="area", style=f"height:{self._height}px"),
            el("div", below, class_="x"),
            class_="plot",
            style=f"--labels:{min(widest, 14)}ch",
        )

    def _grid(self) -> list[Html]:
        ticks = self._y.ticks if self._y is not None else []
        across = [f"M0 {self._height * (1 - self._up(at)):.1f}h{WIDTH}" for at, _ in ticks]
        upright = [f"M{self._left(at):.1f} 0v{self._height}" for at, _ in self._x.ticks]
        return [el("path", d="".join([*across, *upright]), class_="grid")]

    def _path(self, d: str, kind: str, title: str) -> None:
        if d:
            self._shapes.append(el("path", el("title", title), d=d, class_=kind))

    def _at(self, x: float, y: float) -> str:
        return f"{self._left(x):.1f} {self._height * (1 - self._up(y)):.1f}"

    def _up(self, y: float) -> float:
        return self._y.part(y) if self._y is not None else 1 - y

    def _left(self, x: float) -> float:
        return WIDTH * self._x.part(x)


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """(class, text) of what is in a picture."""
    return el("p", [el("span", el("i", class_=kind), text) for kind, text in entries], class_="legend")


def _round_up(value: float, power: float) -> float:
    return next(power * step for step in (1, 2, 2.5, 5, 10, 20) if power * step >= value * 0.999)


def _multiples(least: float, most: float, step: float) -> list[float]:
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _with_unit(plain: Axis, unit: str) -> Axis:
    return Axis(plain.least, plain.most, [(value, f"{text}{unit}") for value, text in plain.ticks])
