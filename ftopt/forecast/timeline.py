"""Compute and transfers on one link: how long a period takes with both.

A replica computes along one line; a position on it is a number of seconds of computation. Transfers begin at one
position and are needed at another. The link has one transfer at a time. If a transfer is needed before it is there, the
computation waits. The compute utilization is the share of the time that is computation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST, _LAST = 2, 4
"""The periods between whose ends time is measured, when the pipeline has filled. One more is played."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer per period.

    Args:
        at_s: the position, in [0, period), from which it may be sent.
        needed_s: the position at which its result is needed, >= ``at_s``; may lie in a later period.
        link_s: seconds on the link, which has one transfer at a time.
        lag_s: further seconds until the result is there: latency, arithmetic. Default 0.
        held_s: seconds that the computation stops for it in any case. Default 0.
        patience_s: how long the computation waits at ``needed_s``; for a later result it waits when the same transfer
            is due again. Default infinity.
    """

    at_s: float
    needed_s: float
    link_s: float
    lag_s: float = 0.0
    held_s: float = 0.0
    patience_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Played:
    """A period when the pipeline has filled.

    Args:
        wall_s: its duration in seconds, >= its computation.
        late_s: maximum seconds by which a result comes after the computation has reached ``needed_s``.
    """

    wall_s: float
    late_s: float


def play(period_s: float, transfers: Sequence[Transfer]) -> Played:
    """Plays period after period, with all transfers. ``period_s``: seconds of computation per period. ``transfers``:
    those of each period, in any order."""
    events: list[tuple[float, int, int, int]] = []  # position, kind, period, index of the transfer
    for number in range(_LAST + 1):
        events += [(number * period_s + x.at_s, _ISSUE, number, index) for index, x in enumerate(transfers)]
        events.append(((number + 1) * period_s, _END, number, 0))
    heapq.heapify(events)
    clock_s = position_s = free_s = late_s = 0.0
    done_s: dict[tuple[int, int], float] = {}
    ends_s: list[float] = []
    while len(ends_s) < _LAST:
        at_s, kind, number, index = heapq.heappop(events)
        clock_s += at_s - position_s
        position_s = at_s
        if kind == _END:
            ends_s.append(clock_s)
            continue
        x = transfers[index]
        if kind == _ISSUE:
            clock_s = max(clock_s, done_s.get((number - 1, index), 0.0))
            free_s = max(clock_s, free_s) + x.link_s
            done_s[number, index] = free_s + x.lag_s
            heapq.heappush(events, (max(at_s, number * period_s + x.needed_s), _NEED, number, index))
        else:
            late_s = max(late_s, done_s[number, index] - clock_s)
            clock_s = max(clock_s, min(done_s[number, index], clock_s + x.patience_s)) + x.held_s
    return Played((ends_s[_LAST - 1] - ends_s[_FIRST - 1]) / (_LAST - _FIRST), late_s)


_ISSUE, _NEED, _END = 0, 1, 2
"""Kinds of events; at the same position they happen in this order."""
