"""What a section of a report consists of, as ``assets/report.js`` draws it: JSON values, text as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Block = dict[str, Any]
HUES = 8


def section(title: str, *blocks: Block | None) -> Block:
    """A part of the report."""
    return {"title": title, "blocks": [block for block in blocks if block is not None]}


def text(said: str, kind: str = "") -> Block:
    """A paragraph; ``kind``: a class of the style sheet. What stands between backticks is code."""
    return {"kind": "text", "text": said, "class": kind}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, fold: str | None = None) -> Block:
    """Texts in rows; columns of numbers are aligned right. ``fold``: behind its title, ``open`` or ``closed``."""
    block: Block = {"kind": "table", "head": list(head), "rows": [list(row) for row in rows]}
    return block | ({"title": title} if title else {}) | folded(fold)


def folded(fold: str | None) -> Block:
    """The key of a block that a reader opens and closes."""
    return {} if fold is None else {"fold": fold}


def legend(entries: Iterable[tuple[str, str]]) -> Block:
    """(class, text) of what is in a plot."""
    return {"kind": "legend", "entries": [list(entry) for entry in entries]}


def plots(*each: Block) -> Block:
    """Plots side by side."""
    return {"kind": "plots", "plots": list(each)}


def plot(label: str, caption: str, shapes: Sequence[Block], *, x: Sequence[object], **more: object) -> Block:
    """A picture.

    Args:
        label: what it shows, for those who do not see it.
        caption: stands below.
        shapes: see `shape`.
        x: least, most, ``clock`` for seconds since the start, ``s`` for seconds, and how many ticks.
        more: ``y`` likewise, or ``rows``: names of rows of equal height; ``height`` in pixels.
    """
    return {"label": label, "caption": caption, "shapes": list(shapes), "x": list(x), **more}


def shape(kind: str, look: str, name: str, points: Iterable[float], row: int | None = None) -> Block:
    """``line`` or ``dots``: x and y in turn; ``blocks``: from and to in turn, in a row; ``marks``: x, in a row.

    ``look``: classes of the style sheet; ``name``: shown at the pointer.
    """
    found: Block = {"kind": kind, "class": look, "name": name, "points": [_short(x) for x in points]}
    return found if row is None else found | {"row": row}


def _short(number: float) -> float:
    return float(f"{number:.6g}")
