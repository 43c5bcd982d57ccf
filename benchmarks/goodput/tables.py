"""Real | simulated | difference, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.goodput.account import Account
from benchmarks.speed.figures import table

Accounts = Mapping[str, Account]
_PERCENT = ("goodput", "committed", "stall")
_COUNTS = ("attempts", "lost", "others")
_TITLES = {
    "goodput": "goodput",
    "committed": "attempts committed",
    "stall": "stall",
    "attempts": "attempts",
    "lost": "steps lost with machines",
    "others": "steps lost by others, or done again",
}


def beside(real: Accounts, found: Accounts) -> list[str]:
    """One schedule."""
    return table(
        [
            {"way": way, "": _TITLES[what], **_cells(what, [getattr(x, what)], [getattr(found[way], what)])}
            for way, x in real.items()
            for what in (*_PERCENT, *_COUNTS)
            if getattr(x, what) is not None and getattr(found[way], what) is not None
        ]
    )


def summary(real: Sequence[Accounts], found: Sequence[Accounts]) -> list[str]:
    """Means over all schedules, with the least and the most; counts are sums."""
    return table(
        [
            {"way": way, "": _TITLES[what], **_cells(what, *_both(way, what, real, found))}
            for way in real[0]
            for what in (*_PERCENT, *_COUNTS)
            if None not in (x := _both(way, what, real, found))[0] + x[1]
        ]
    )


def _both(way: str, what: str, real: Sequence[Accounts], found: Sequence[Accounts]) -> tuple[list[float], list[float]]:
    return [getattr(x[way], what) for x in real], [getattr(x[way], what) for x in found]


def _cells(what: str, real: Sequence[float], found: Sequence[float]) -> dict[str, str]:
    if what in _COUNTS:
        a, b = sum(real), sum(found)
        return {"real": f"{a:,}", "simulated": f"{b:,}", "difference": f"{b - a:+,}"}
    differences = [y - x for x, y in zip(real, found, strict=True)]
    return {"real": _spread(real), "simulated": _spread(found), "difference": _spread(differences, sign="+")}


def _spread(values: Sequence[float], sign: str = "") -> str:
    middle = f"{statistics.fmean(values):{sign}.1%}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{sign}.1%} to {max(values):{sign}.1%})"


def odd(found: Mapping[str, Mapping[str, int]]) -> str:
    """What happened that should not."""
    parts = [f"{way}: {count} x {what}" for way, kinds in found.items() for what, count in kinds.items()]
    return "odd: " + ("; ".join(parts) or "nothing")
