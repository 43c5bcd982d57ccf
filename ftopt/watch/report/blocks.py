"""The parts of a report's sections, as ``assets/report.js`` draws them: JSON values with plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ftopt.watch.jsonl import significant

Block = dict[str, Any]
HUES = 8
SINCE_START = ("time", "clock")


def section(title: str, *blocks: Block | None, wide: bool = False) -> Block:
    """A section of the report. ``wide``: as wide as the page."""
    return {"title": title, "blocks": [block for block in blocks if block is not None], "wide": wide}


def text(said: str, kind: str = "") -> Block:
    """A paragraph; ``kind``: a class of the style sheet. Text between backticks is code."""
    return {"kind": "text", "text": said, "class": kind}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, fold: str | None = None) -> Block:
    """A table of texts; columns of numbers are right-aligned. ``fold``: the title folds it, ``open`` or ``closed`` at
    first."""
    block: Block = {"kind": "table", "head": list(head), "rows": [list(row) for row in rows]}
    return block | ({"title": title} if title else {}) | ({"fold": fold} if fold is not None else {})


def bar(label: str, parts: Iterable[tuple[str, str, int, str]]) -> Block:
    """The parts of a whole: class of the style sheet, name, number, share."""
    return {"kind": "bar", "label": label, "parts": [list(part) for part in parts]}


def chart(label: str, lines: Sequence[Block], *, axes: Sequence[Sequence[Any]], **more: object) -> Block:
    """Curves.

    Args:
        label: a description for those who cannot see it.
        lines: see `line`.
        axes: title and kind of each horizontal axis to choose from (``clock``: seconds since the start), and its first
            and last value if they are not those of the points.
        more: ``y``: ``s`` for seconds, or another unit that is 0 or more; ``scales``: a reader can choose a logarithmic
            scale; ``height`` in pixels.
    """
    return {"kind": "chart", "label": label, "axes": [list(x) for x in axes], "lines": list(lines), **more}


def line(look: str, hue: str, name: str, points: Iterable[Sequence[float]]) -> Block:
    """``look``: ``line``, ``dots``, ``dotted``, ``stepped``, or ``most`` and ``least``: the edges of a band. ``hue``: a
    class of the style sheet. A point has a value of each axis of the chart, and y."""
    return {"look": look, "hue": hue, "name": name, "points": [significant(x) for point in points for x in point]}
