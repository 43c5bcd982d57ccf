"""Numbers, durations and sizes for readers. A number and its unit stay on one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ftopt.common.plural import count
from ftopt.watch.sentences import figure

DASH = "\N{EN DASH}"
"""Stands for an unknown value."""
_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def whole(number: int | None) -> str:
    return DASH if number is None else f"{number:,}"


def real(number: float | None, digits: int = 5) -> str:
    """A loss, with ``digits`` significant digits."""
    return DASH if number is None or not math.isfinite(number) else figure(number, digits)


def share(part: float, of: float) -> str:
    """A percentage; 100 % and 0 % only if it is all or nothing."""
    if not of or part == of:
        return _fixed("100 %") if of else DASH
    percent = 100 * part / of
    return _fixed(f"{percent:.{1 if 0.1 <= percent <= 99.9 else 2}f} %")


def size(number: float | None) -> str:
    """A size in bytes: ``21.0 MB``."""
    if number is None:
        return DASH
    for unit, factor in _SIZES:
        if number >= factor:
            return f"{number / factor:.3g} {unit}" if number < 999.5 * factor else f"{number / factor:,.0f} {unit}"
    return _fixed(f"{number:.0f} bytes")


def span(seconds: float) -> str:
    """A duration: ``0.22 s``, ``31.5 s``, ``1 min 30 s``, ``2 h 5 min``."""
    if seconds < 10:
        return _fixed(f"{seconds:.3g} s" if seconds >= 0.001 or not seconds else "below 1 ms")
    if seconds < 59.95:
        return _fixed(f"{seconds:.1f} s")
    rest = round(seconds)
    for unit, small, of, most in (("min", "s", 60, 60), ("h", "min", 60, 48), ("days", "h", 24, 0)):
        large, part = divmod(rest, of)
        if large < most or not most:
            return _fixed(f"{large} {unit} {part} {small}" if part else f"{large} {unit}")
        rest = large
    raise AssertionError(seconds)


def listed(words: Sequence[str], most: int = 8) -> str:
    """``a, b and c``; if there are many, the first ones and the number of the others."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {count(len(words) - most, 'other')}"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def cut(text: str, most: int = 200) -> str:
    """The beginning of a long text."""
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def _fixed(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")
