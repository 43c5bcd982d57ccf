"""Sets of integers as tuples of ranges: sorted, disjoint, not adjacent pairs ``(start, stop)``, without ``stop``.

All functions take and return such tuples (`union` takes any ranges); nothing is changed in place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def union(*sets: Iterable[Range]) -> Ranges:
    """The union of sets, whose ranges may be in any order, overlap, touch, or be empty."""
    found: list[Range] = []
    for start, stop in sorted(chain.from_iterable(sets)):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            if stop > found[-1][1]:
                found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def subtract(a: Ranges, b: Ranges) -> Ranges:
    """The integers in ``a`` that are not in ``b``. O(len(a) * log(len(b)) + overlaps)."""
    if not a or not b:
        return a
    found: list[Range] = []
    for start, stop in a:
        at = _first(b, start)
        while start < stop and at < len(b) and b[at][0] < stop:
            if start < b[at][0]:
                found.append((start, b[at][0]))
            start = max(start, b[at][1])
            at += 1
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """The integers in both. O(len(a) * log(len(b)) + overlaps)."""
    found: list[Range] = []
    for start, stop in a:
        at = _first(b, start)
        while at < len(b) and b[at][0] < stop:
            found.append((max(start, b[at][0]), min(stop, b[at][1])))
            at += 1
    return tuple(found)


def in_order(a: Ranges, known: Iterable[Range]) -> tuple[Range, ...]:
    """All of ``a``, each once: first the integers in ``known``, in its order, then the rest."""
    ordered: list[Range] = []
    for each in known:
        ordered += (found := intersect((each,), a))
        a = subtract(a, found)
    return (*ordered, *a)


def contains(b: Ranges, a: Ranges) -> bool:
    """Whether all of ``a`` is in ``b``."""
    return all((at := _first(b, start)) < len(b) and b[at][0] <= start and stop <= b[at][1] for start, stop in a)


def size(a: Iterable[Range]) -> int:
    """The number of integers; overlapping ranges all count in full."""
    return sum(stop - start for start, stop in a)


def first(a: Ranges, count: int, *, parts: int) -> Ranges:
    """The ``count`` smallest integers, or all if there are fewer, in at most ``parts`` ranges."""
    found: list[Range] = []
    for start, stop in a[:parts]:
        if count <= 0:
            break
        found.append((start, min(stop, start + count)))
        count -= stop - start
    return tuple(found)


def low_water(a: Ranges) -> int:
    """The smallest integer from 0 on that is not in ``a``."""
    return a[0][1] if a and a[0][0] == 0 else 0


def end(a: Ranges) -> int:
    """The largest integer plus 1; 0 when empty."""
    return a[-1][1] if a else 0


def _first(b: Ranges, start: int) -> int:
    """The index of the first range of ``b`` that ends after ``start``."""
    at = bisect_right(b, (start,))
    return at - 1 if at and b[at - 1][1] > start else at
