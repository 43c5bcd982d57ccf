"""Times on the command line: what a user gives, and what is shown."""

from __future__ import annotations

import argparse
import math
import re

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_FORMS = "in seconds or as in 300ms, 90s, 10min, 6h, 2d"


def seconds(text: str) -> float:
    """Parses ``6h``, ``90s``, ``0.3``, ``inf`` as seconds, of any sign; else raises argparse.ArgumentTypeError."""
    value = _value(text)
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r}; must be a time, {_FORMS}")
    return value


def seconds_above_0(text: str) -> float:
    """Like `seconds`, but positive and finite."""
    value = _value(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; must be a time above 0, {_FORMS}")
    return value


def shown(seconds: float) -> str:
    """A time in the largest unit that fits into it."""
    for unit in ("d", "h", "min", "s"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def _value(text: str) -> float:
    found = re.fullmatch(r"(.*?) ?(ms|s|min|h|d)?", text.strip())
    try:
        return float(found[1]) * _UNITS[found[2] or "s"] if found else math.nan
    except ValueError:
        return math.nan
