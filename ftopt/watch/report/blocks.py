"""The parts of a report's sections, as ``assets/report.js`` draws them: JSON values with plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Block = dict[str, Any]
HUES = 8


def section(title: str, *blocks: Block | None) -> Block:
    """A section of the report."""
    return {"title": title, "blocks": [block for block in blocks if block is not None]}


def text(said: str, kind: str = "") -> Block:
    """A paragraph; ``kind``: a class of the style sheet. Text between backticks is code."""
    return {"kind": "text", "text": said, "class": kind}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, fold: str | None = None) -> Block:
    """A table of texts; columns of numbers are right-aligned. ``fold``: the title folds it, ``open`` or ``closed`` at
    first."""
    block: Block = {"kind": "table", "head": list(head), "rows": [list(row) for row in rows]}
    return block | ({"title": title} if title else {}) | folded(fold)


def folded(fold: str | None) -> Block:
    """The key of a block that a reader can fold."""
    return {} if fold is None else {"fold": fold}


def legend(entries: Iterable[tuple[str, str]]) -> Block:
    """The legend of a plot, as pairs (class, text)."""
    return {"kind": "legend", "entries": [list(entry) for entry in entries]}


def plots(*each: Block) -> Block:
    """Plots side by side."""
    return {"kind": "plots", "plots": list(each)}


def plot(label: str, caption: str, shapes: Sequence[Block], *, x: Sequence[object], **more: object) -> Block:
    """A picture.

    Args:
        label: a description for those who cannot see it.
        caption: the text below.
        shapes: see `shape`.
        x: minimum, maximum, ``clock`` for seconds since the start or ``s`` for seconds, and the number of ticks.
        more: ``y`` in the same form, or ``rows``: names of rows of equal height; ``height`` in pixels.
    """
    return {"label": label, "caption": caption, "shapes": list(shapes), "x": list(x), **more}


def shape(kind: str, look: str, name: str, points: Iterable[float], row: int | None = None) -> Block:
    """``line`` or ``dots``: alternating x and y; ``blocks``: alternating start and end, in a row; ``marks``: x, in a
    row.

    ``look``: classes of the style sheet; ``name``: shown next to the pointer.
    """
    found: Block = {"kind": kind, "class": look, "name": name, "points": [_short(x) for x in points]}
    return found if row is None else found | {"row": row}


def _short(number: float) -> float:
    return float(f"{number:.6g}")
