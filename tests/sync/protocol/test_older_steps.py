"""Contributions of an older step than others', where replicas have each step alike: they weigh nothing."""

from __future__ import annotations

from dataclasses import replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table


def offer(seat: Seat, at_step: int, *, weight: float = 5.0) -> None:
    contribution = replace(m.Contribution(0, 0, 5, 5, 5.0), at_step=at_step, weight=weight)
    seat.do(seat.machine.propose(contribution if weight else m.excluded(contribution), now=False))


def told(*seats: Seat) -> list[tuple[bool, float]]:
    """For each: whether it is told that it is of an older step, and what its contribution weighs."""
    for seat in seats:
        seat.take()
    starts = [seat.pop(r.StartReduce) for seat in seats]
    return [(start.quorum.older, start.contribution.weight) for start in starts]


def test_one_of_an_older_step_weighs_nothing_and_stays_pending() -> None:
    a, b, c = Table().start("a", "b", "c")
    offer(a, 7)
    offer(b, 6)
    offer(c, 7)
    assert told(a, b, c) == [(False, 5.0), (True, 0.0), (False, 5.0)]


def test_one_that_weighs_nothing_makes_nobody_older() -> None:
    a, b, c = Table().start("a", "b", "c")
    offer(a, 7)
    offer(b, 9, weight=0.0)
    offer(c, 7)
    assert told(a, b, c) == [(False, 5.0), (False, 0.0), (False, 5.0)]
