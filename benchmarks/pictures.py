"""Pictures of the tables: all that matplotlib is needed for (``pip install -e '.[bench]'``)."""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec

from ftopt.cli.shared.output import complain

Curve = Sequence[tuple[int, float]]
Scale = Literal["linear", "log"]
P = ParamSpec("P")


def _if_installed(draw: Callable[P, None]) -> Callable[P, bool]:
    """Returns whether there is a picture: the figures of a benchmark are worth it without one, too."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> bool:
        if importlib.util.find_spec("matplotlib") is None:
            complain("no picture is drawn: matplotlib is not installed (pip install -e '.[bench]' -c constraints.txt)")
            return False
        draw(*args, **kwargs)
        return True

    return drawn


@_if_installed
def methods(
    curves: Mapping[str, Sequence[Curve]],
    points: Mapping[str, tuple[float, float]],
    path: Path,
    *,
    alone: float | None = None,
) -> None:
    """Held-out loss over inner steps, and over the bytes that a replica has sent at the end.

    Args:
        curves: method -> a curve a seed, of (inner step, loss); the mean is drawn, and the range over seeds.
        points: method and codec -> (MB sent, loss), both means over seeds.
        path: a PNG; written anew.
        alone: one replica's loss.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5), dpi=110)
    for name, of_seeds in curves.items():
        steps = [step for step, _ in of_seeds[0]]
        losses = [[curve[i][1] for curve in of_seeds] for i in range(len(steps))]
        (line,) = left.plot(steps, [statistics.mean(row) for row in losses], label=name, linewidth=1.4)
        lows, highs = [min(row) for row in losses], [max(row) for row in losses]
        left.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    left.set(xlabel="inner steps of each replica", ylabel="held-out loss, nats a byte", ylim=(None, 2.6))
    left.legend(fontsize=8)
    left.grid(alpha=0.3)
    marks = "osD^vPX*"
    for k, (name, (sent, loss)) in enumerate(sorted(points.items(), key=lambda item: item[1][1])):
        right.plot(sent, loss, marks[k % len(marks)], color=pyplot.cm.tab20(k % 20), markersize=7, label=name)
    if alone is not None:
        right.axhline(alone, color="black", linewidth=1, linestyle=":", label="one replica (sends nothing)")
    right.set(xscale="log", xlabel="sent by a replica, MB", ylabel="held-out loss at the end")
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), title="best first", title_fontsize=7)
    right.grid(alpha=0.3, which="both")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


@_if_installed
def bars(found: Mapping[str, tuple[float, float, float]], path: Path, *, what: str, scale: Scale = "linear") -> None:
    """A bar a line, with the quartiles.

    Args:
        found: label -> (median, first quartile, third quartile).
        path: a PNG; written anew.
        what: the figure's name and unit.
        scale: of the horizontal axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.32 * len(found)), dpi=110)
    medians = [median for median, _, _ in found.values()]
    reach = [[m - low for m, low, _ in found.values()], [high - m for m, _, high in found.values()]]
    axes.barh(list(found), medians, xerr=reach, color="tab:blue", alpha=0.8, error_kw={"linewidth": 1})
    axes.invert_yaxis()
    axes.set(xlabel=what, xscale=scale)
    if scale == "linear":
        axes.set_xlim(0, None)
    else:
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(_plainly))
    for bar, median in zip(axes.patches, medians, strict=True):
        axes.annotate(f" {median:.3g}", (median, bar.get_y() + bar.get_height()), va="bottom", fontsize=7, color="gray")
    axes.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves in one pair of axes.

    Args:
        curves: label -> points. One whose label begins with ``_`` is dotted, in the colour of the one before it, and
            has no line in the legend.
        x: what the horizontal axis shows, with its unit.
        y: likewise.
        scale: of the horizontal axis.
        least: where the vertical axis begins. Default: where the curves do.
    """

    curves: Mapping[str, Sequence[tuple[float, float]]]
    x: str
    y: str
    scale: Scale = "linear"
    least: float | None = None


@_if_installed
def lines(panels: Sequence[Panel], path: Path) -> None:
    """Panels side by side; a PNG, written anew. The legend is in the first one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    width = 7 if len(panels) < 3 else 5
    figure, row = pyplot.subplots(1, len(panels), figsize=(width * len(panels), 4.5), dpi=110, squeeze=False)
    for panel, axes in zip(panels, row[0], strict=True):
        color = None
        for label, points in panel.curves.items():
            x, y = zip(*points, strict=True)
            if label.startswith("_"):
                axes.plot(x, y, ":", color=color, linewidth=1.2)
            else:
                marker = "o" if len(points) < 20 else ""
                color = axes.plot(x, y, marker=marker, markersize=3, linewidth=1.4, label=label)[0].get_color()
        axes.set(xlabel=panel.x, ylabel=panel.y, xscale=panel.scale, ylim=(panel.least, None))
        if panel.scale == "log":
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(_plainly))
        axes.grid(alpha=0.3)
    if len(panels[0].curves) > 1:
        row[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


@_if_installed
def course(
    curves: Mapping[str, tuple[Sequence[tuple[float, float]], Sequence[float]]],
    path: Path,
    *,
    x: str,
    y: str,
    steps: bool = False,
    least: float | None = None,
) -> None:
    """What up to four ways reach, to be read at 700 pixels.

    Args:
        curves: label, which is written at the curve's end -> points, and where on the horizontal axis processes were
            killed.
        path: a PNG; written anew.
        x, y: what the axes show.
        steps: whether there are steps between the points.
        least: where the vertical axis begins. Default: where the curves do.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 3.9), dpi=200)
    struck: list[tuple[float, float]] = []
    colors = ("#0b62a4", "#c2570c", "#5aa1d6", "#e8a66a")[: len(curves)]
    for color, (label, (points, kills)) in zip(colors, curves.items(), strict=True):
        across, up = zip(*points, strict=True)
        axes.plot(across, up, color=color, linewidth=2, drawstyle="steps-post" if steps else "default")
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "weight": "bold"}
        axes.annotate(label, (across[-1], up[-1]), color=color, annotation_clip=False, **place)
        struck += [(kill, [height for at, height in points if at < kill][-1]) for kill in kills]
    if struck:
        across, up = zip(*struck, strict=True)
        axes.plot(across, up, "x", color="#b3261e", markersize=9, markeredgewidth=2.2, label="a process is killed")
        axes.legend(frameon=False, loc="upper left")
    axes.set(xlabel=x, ylabel=y, xlim=(0, None), ylim=(least, None))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(_plainly))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _plainly(value: float, _: object) -> str:
    return f"{value:,g}"
