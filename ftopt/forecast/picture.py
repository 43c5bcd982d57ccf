"""The picture of a comparison: over time, which share of the machines' possible work is in the model; an SVG file."""

from __future__ import annotations

from collections.abc import Sequence

from ftopt.forecast.comparison import Row
from ftopt.forecast.traces import Trace
from ftopt.watch.report.html import Html, el
from ftopt.watch.report.plot import Axis, axis, times

_WIDTH, _HEIGHT, _LEFT, _TOP, _FLEET = 1000, 420, 60, 30, 90
_LEGEND = 18
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
_FONT = "font-family:system-ui,sans-serif;font-size:12px;fill:#333"


def draw(trace: Trace, rows: Sequence[Row], *, step_s: float, batch: int) -> str:
    """Returns the SVG: one line a policy, over the number of machines. ``step_s``, ``batch``: of a usual machine."""
    x = times(0.0, trace.end_s)
    y = axis(0.0, 1.0)
    sizes = trace.sizes()
    fleet = axis(0.0, float(max(size for _, size in sizes)), ticks=2)
    below = _TOP + _HEIGHT + 40
    shapes = [*_grid(x, y, _TOP, _HEIGHT, percent=True), *_grid(x, fleet, below, _FLEET, percent=False)]
    possible = _Possible(trace, step_s / batch)
    for number, row in enumerate(rows):
        points = [(at, done / possible.at(at)) for at, done in row.outcome.line if at > 0 and possible.at(at) > 0]
        shapes.append(_path(_places(_thinned(points), x, y, _TOP, _HEIGHT), number, row))
    steps: list[tuple[float, float]] = []
    for (at_s, size), (next_s, _) in zip(sizes, [*sizes[1:], (trace.end_s, 0)], strict=True):
        steps += [(at_s, size), (next_s, size)]
    shapes.append(el("path", d=_places(steps, x, fleet, below, _FLEET), fill="none", stroke="#777"))
    shapes.append(_text(_LEFT, below - 8, "machines"))
    shapes.append(
        _text(
            _LEFT,
            _TOP - 10,
            f"{trace.name}: samples in the model / samples that the machines could have computed"[:120],
        )
    )
    legend_s = below + _FLEET + 45
    for number, row in enumerate(rows):
        at = legend_s + number * _LEGEND
        dash = None if row.simulated else "5 4"
        shapes.append(
            el("path", d=f"M{_LEFT} {at - 4}h30", stroke=_colour(number), stroke_width=2, stroke_dasharray=dash)
        )
        shapes.append(_text(_LEFT + 40, at, f"{row.outcome.goodput:6.1%}  {row.policy}"))
    total = legend_s + len(rows) * _LEGEND
    frame = f"0 0 {_WIDTH + _LEFT + 20} {total}"
    return el("svg", shapes, xmlns="http://www.w3.org/2000/svg", viewBox=frame, style=_FONT, role="img") + "\n"


class _Possible:
    """How many samples the machines could have computed by a moment, from a trace's sizes."""

    def __init__(self, trace: Trace, sample_s: float) -> None:
        self._sizes, self._sample_s = [*trace.sizes(), (trace.end_s, 0)], sample_s

    def at(self, time_s: float) -> float:
        total = 0.0
        for (start_s, size), (stop_s, _) in zip(self._sizes, self._sizes[1:], strict=False):
            total += size * max(0.0, min(stop_s, time_s) - start_s)
        return total / self._sample_s


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return points if len(points) <= 400 else [*points[:: len(points) // 400], points[-1]]


def _grid(x: Axis, y: Axis, top: int, height: int, *, percent: bool) -> list[Html]:
    found: list[Html] = []
    for value, text in y.ticks:
        at = top + height * (1 - y.part(value))
        found.append(el("path", d=f"M{_LEFT} {at:.1f}h{_WIDTH}", stroke="#ddd"))
        found.append(_text(_LEFT - 8, at + 4, f"{value:.0%}" if percent else text, anchor="end"))
    for value, text in x.ticks:
        at = _LEFT + _WIDTH * x.part(value)
        found.append(el("path", d=f"M{at:.1f} {top}v{height}", stroke="#eee"))
        found.append(_text(at, top + height + 18, text, anchor="middle"))
    return found


def _places(points: Sequence[tuple[float, float]], x: Axis, y: Axis, top: int, height: int) -> str:
    places = (f"{_LEFT + _WIDTH * x.part(at):.1f} {top + height * (1 - y.part(value)):.1f}" for at, value in points)
    return "M" + "L".join(places) if points else ""


def _path(places: str, number: int, row: Row) -> Html:
    dash = None if row.simulated else "5 4"
    title = el("title", row.policy)
    return el("path", title, d=places, fill="none", stroke=_colour(number), stroke_width=2, stroke_dasharray=dash)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _text(x: float, y: float, text: str, *, anchor: str | None = None) -> Html:
    return el("text", text, x=f"{x:g}", y=f"{y:g}", text_anchor=anchor)
