"""HTML as text that is escaped by construction: what is not `Html` already is escaped when it goes into an element."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_VOID = {"meta", "br"}


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def el(tag: str, *children: object, **attributes: object) -> Html:
    """An element.

    Args:
        tag: its name.
        children: `Html`, which is taken as it is; an iterable of children, but no plain text; all else as escaped text.
        attributes: a trailing underscore is dropped (``class_``), others become hyphens. None, False: left out; True:
            the name alone.
    """
    said = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{said}>")
    return Html(f"<{tag}{said}>{join(children)}</{tag}>")


def join(children: Iterable[object]) -> Html:
    """Children one after another, as `el` takes them."""
    return Html("".join(_child(child) for child in children))


def with_code(text: str) -> Html:
    """``text`` with what stands between backticks as code, which a line's end does not divide at a hyphen."""
    return join(el("code", part) if n % 2 else part for n, part in enumerate(re.split(r"`([^`]*)`", text)))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str | None = None) -> Html:
    """A table that scrolls by itself when it is wider than the page; numbers are aligned right."""
    every = list(rows)
    right = [column > 0 and any(isinstance(row[column], Number) for row in every) for column in range(len(head))]
    titles = [el("th", cell, scope="col", class_="n" if right[n] else None) for n, cell in enumerate(head)]
    body = [el("tr", [_cell(n, cell) for n, cell in enumerate(row)]) for row in every]
    says = el("caption", caption) if caption else None
    return el("div", el("table", says, el("thead", el("tr", titles)), el("tbody", body)), class_="scroll", tabindex="0")


_LONG = 20
"""Characters of a cell that is not to become a narrow column where the page is."""


class Number(str):
    """Text of a number, for a cell that is aligned right."""

    __slots__ = ()


def shown(text: str) -> str:
    """Replaces what a page should not hold: control characters, lone surrogates, changes of direction."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t\N{NO-BREAK SPACE}" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _cell(number: int, cell: object) -> Html:
    if number == 0:
        return el("th", cell, scope="row")
    long = "long" if isinstance(cell, str) and not isinstance(cell, Html) and len(cell) > _LONG else None
    return el("td", cell, class_="n" if isinstance(cell, Number) else long)


def _child(child: object) -> str:
    if isinstance(child, Html):
        return child
    if child is None:
        return ""
    if isinstance(child, Iterable) and not isinstance(child, str):
        return join(child)
    return escape(shown(str(child)), quote=False)


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(shown(str(value)))}"'
