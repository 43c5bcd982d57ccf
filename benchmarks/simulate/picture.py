"""The picture of a comparison: the share of the machines' possible work that is in the model, over time; an SVG
file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from benchmarks.simulate.comparison import Row
from benchmarks.simulate.traces import Trace

_WIDTH, _HEIGHT, _LEFT, _TOP, _FLEET = 1000, 420, 60, 30, 90
_LEGEND = 18
_STEPS_S = (1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200)
_COLOURS = (
    "#0b62a4",
    "#d1495b",
    "#2e933c",
    "#8a4fb5",
    "#e07a00",
    "#00838f",
    "#6d4c41",
    "#c2185b",
    "#546e7a",
    "#9e9d24",
)
_STYLE = "font-family:system-ui,sans-serif;font-size:12px;fill:#333"
Points = Sequence[tuple[float, float]]


def draw(trace: Trace, rows: Sequence[Row], *, step_s: float, batch: int) -> str:
    """Returns the SVG: one line per policy, above the number of machines. ``step_s``, ``batch``: of a usual machine."""
    sizes = trace.sizes()
    largest = max(size for _, size in sizes)
    shares = _Frame(trace.end_s, 1.0, _TOP, _HEIGHT)
    fleet = _Frame(trace.end_s, float(largest), _TOP + _HEIGHT + 40, _FLEET)
    shapes = shares.grid([n / 5 for n in range(6)], "{:.0%}".format)
    shapes += fleet.grid([n * max(1, largest // 2) for n in range(1 + largest // max(1, largest // 2))], "{:g}".format)
    possible = _Possible(trace, step_s / batch)
    for number, row in enumerate(rows):
        points = [(at, done / possible.at(at)) for at, done in row.outcome.line if at > 0 and possible.at(at) > 0]
        shapes.append(_path(shares.places(_thinned(points)), number, row))
    steps: list[tuple[float, float]] = []
    for (at_s, size), (next_s, _) in zip(sizes, [*sizes[1:], (trace.end_s, 0)], strict=True):
        steps += [(at_s, size), (next_s, size)]
    shapes.append(f'<path d="{fleet.places(steps)}" fill="none" stroke="#777"/>')
    shapes.append(_text(_LEFT, fleet.top - 8, "machines"))
    title = f"{trace.name}: samples in the model / samples that the machines could have computed"
    shapes.append(_text(_LEFT, _TOP - 10, title[:120]))
    at = fleet.top + _FLEET + 45
    for number, row in enumerate(rows):
        shapes.append(_path(f"M{_LEFT} {at - 4}h30", number, row))
        shapes.append(_text(_LEFT + 40, at, f"{row.outcome.goodput:6.1%}  {row.policy}"))
        at += _LEGEND
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 20} {at}" style="{_STYLE}" role="img"'
    return f"<svg {head}>{''.join(shapes)}</svg>\n"


class _Frame:
    """A time axis, and an axis from 0 to ``most``."""

    def __init__(self, end_s: float, most: float, top: int, height: int) -> None:
        self._end_s, self._most, self.top, self._height = end_s, most, top, height

    def at(self, t_s: float) -> float:
        return _LEFT + _WIDTH * t_s / self._end_s

    def up(self, value: float) -> float:
        return self.top + self._height * (1 - min(1.0, value / self._most))

    def places(self, points: Points) -> str:
        return "M" + "L".join(f"{self.at(t_s):.1f} {self.up(value):.1f}" for t_s, value in points) if points else ""

    def grid(self, values: Sequence[float], text: Callable[[float], str]) -> list[str]:
        found = []
        for value in values:
            found.append(f'<path d="M{_LEFT} {self.up(value):.1f}h{_WIDTH}" stroke="#ddd"/>')
            found.append(_text(_LEFT - 8, self.up(value) + 4, text(value), anchor="end"))
        rough_s = self._end_s / 6
        step_s = next((step for step in _STEPS_S if step >= rough_s), 86400 * math.ceil(rough_s / 86400))
        for n in range(int(self._end_s / step_s) + 1):
            at = self.at(n * step_s)
            found.append(f'<path d="M{at:.1f} {self.top}v{self._height}" stroke="#eee"/>')
            found.append(_text(at, self.top + self._height + 18, _clock(n * step_s), anchor="middle"))
        return found


class _Possible:
    """How many samples the machines could have computed up to a time, from a trace's sizes."""

    def __init__(self, trace: Trace, sample_s: float) -> None:
        self._sizes, self._sample_s = [*trace.sizes(), (trace.end_s, 0)], sample_s

    def at(self, time_s: float) -> float:
        total = 0.0
        for (start_s, size), (stop_s, _) in zip(self._sizes, self._sizes[1:], strict=False):
            total += size * max(0.0, min(stop_s, time_s) - start_s)
        return total / self._sample_s


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _thinned(points: Points) -> Points:
    return points if len(points) <= 400 else [*points[:: len(points) // 400], points[-1]]


def _path(places: str, number: int, row: Row) -> str:
    dash = "" if row.simulated else ' stroke-dasharray="5 4"'
    look = f'fill="none" stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="2"{dash}'
    return f'<path d="{places}" {look}><title>{escape(row.policy)}</title></path>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
