"""The quadratic synchronization rule (arXiv 2310.14423) as a plain loop over inner steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction


def qsr(rate: Callable[[int], float], *, steps: int, alpha: float, least: int, warmup: int, most: int) -> list[int]:
    """The inner steps after which replicas synchronize; ``rate``: the inner rate after so many steps."""
    found, began = [], 0
    for step in range(steps):
        rates = [Fraction(rate(each)) for each in range(began, step + 1)]
        mean = float(sum(rates) / len(rates))
        wanted = math.inf if mean == 0 else math.floor((alpha / mean) ** 2)
        if len(rates) >= min(least if began < warmup else max(least, wanted), most):
            found.append(step + 1)
            began = step + 1
    return found
