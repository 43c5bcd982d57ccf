"""Numbers, durations and sizes as a reader wants them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TypeVar

from ftopt.common.plural import count
from ftopt.watch.report.html import Number
from ftopt.watch.sentences import figure

T = TypeVar("T")
_ROWS = 60
_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def whole(number: int | None) -> Number:
    """A whole number; a dash when it is not known."""
    return Number("\N{EN DASH}" if number is None else f"{number:,}")


def real(number: float | None, digits: int = 5) -> Number:
    """A loss, with so many significant digits; a dash when it is not known."""
    return Number("\N{EN DASH}" if number is None or not math.isfinite(number) else figure(number, digits))


def share(part: float, of: float) -> Number:
    """Per cent; 100 % and 0 % only where it is all, or nothing."""
    if not of or part == of:
        return _number("100 %" if of else "\N{EN DASH}")
    percent = 100 * part / of
    digits = 1 if 0.1 <= percent <= 99.9 else 2
    return _number(f"{percent:.{digits}f} %")


def size(number: float | None) -> Number:
    """Bytes: ``21.0 MB``."""
    if number is None:
        return _number("\N{EN DASH}")
    for unit, factor in _SIZES:
        if number >= factor:
            return Number(
                f"{number / factor:.3g} {unit}" if number < 999.5 * factor else f"{number / factor:,.0f} {unit}"
            )
    return _number(f"{number:.0f} bytes")


def span(seconds: float) -> Number:
    """How long: ``0.22 s``, ``31.5 s``, ``1 min 30 s``, ``2 h 5 min``."""
    if seconds < 10:
        return _number(f"{seconds:.3g} s" if seconds >= 0.001 or not seconds else "below 1 ms")
    if seconds < 59.95:
        return _number(f"{seconds:.1f} s")
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return _number(f"{minutes} min {rest} s" if rest else f"{minutes} min")
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return _number(f"{hours} h {minutes} min" if minutes else f"{hours} h")
    days, hours = divmod(hours, 24)
    return _number(f"{days} days {hours} h" if hours else f"{days} days")


def clock(seconds: float) -> Number:
    """When: ``0:50``, ``1:02:03``, since the run's start."""
    sign, rest = ("\N{MINUS SIGN}", -seconds) if seconds < -0.5 else ("", max(0.0, seconds))
    minutes, whole_s = divmod(math.floor(rest), 60)
    hours, minutes = divmod(minutes, 60)
    return Number(f"{sign}{hours}:{minutes:02}:{whole_s:02}" if hours else f"{sign}{minutes}:{whole_s:02}")


def listed(words: Sequence[str], most: int = 8) -> str:
    """``a, b and c``; of many the first ones, and how many there are besides."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {count(len(words) - most, 'other')}"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def cut(text: str, most: int = 200) -> str:
    """A long text's beginning."""
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum of at least one value; as ``summary.json`` has them."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1]


def some(rows: Sequence[T], most: int = _ROWS) -> tuple[list[T], str]:
    """The first and the last rows, ``most`` in all, and what to say of those between."""
    if len(rows) <= most:
        return list(rows), ""
    half = most // 2
    return [*rows[:half], *rows[-half:]], f" (the first {half} and the last {half} of {len(rows):,})"


def _number(text: str) -> Number:
    """A number and its unit, which stay on one line."""
    return Number(text.replace(" ", "\N{NO-BREAK SPACE}"))
