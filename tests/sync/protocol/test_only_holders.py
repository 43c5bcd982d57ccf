"""One member alone has made the newest version, and is lost before another one has fetched it: nobody stands still."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table

GRACE_S = 2.0
DEAD_AFTER_S = 3.0
RECOVERY_S = 30.0
GONE_AFTER_S = 600.0
"""Of the table."""


def waits(seat: Seat) -> bool:
    """Whether the training thread stands still."""
    seat.take()
    return seat.machine.fragments[0].outstanding and not seat.machine.fragments[0].released


def alone(*, proposes: bool = False) -> tuple[Table, Seat, Seat]:
    """B has made version 1 without A, who was late by more than the grace; A fetches it, with or without a contribution
    that came too late."""
    table = Table()
    a, b = table.start("a", "b")
    b.propose(5)
    table.tick(GRACE_S + 1.0)
    assert b.got(m.Quorum)
    if proposes:
        a.propose(3)
    b.reduce()
    b.take()
    a.take()
    assert a.pop(r.Fetch).position.version == 1
    return table, a, b


def test_who_cannot_fetch_the_newest_version_does_not_wait_for_its_next_round() -> None:
    table, a, b = alone()
    b.die()
    a.do(a.machine.fetch_failed(0))
    table.tick(1.0)
    a.take()
    a.propose(10)
    assert not waits(a)


def test_who_has_proposed_and_cannot_fetch_the_newest_version_does_not_wait() -> None:
    table, a, b = alone(proposes=True)
    b.die()
    a.do(a.machine.fetch_failed(0))
    table.tick(1.0)
    assert not waits(a)


def test_a_fetch_that_fails_again_and_again_keeps_nobody_waiting() -> None:
    """The two cannot reach each other."""
    table, a, b = alone(proposes=True)
    for _ in range(3):
        a.do(a.machine.fetch_failed(0))
        assert not waits(a)
        table.tick(3.0)
        a.take()
        assert a.pop(r.Fetch).sources == ("b",)
        assert not waits(a)


def test_a_fetch_is_waited_for_no_longer_than_dead_after_s() -> None:
    table, a, _ = alone(proposes=True)
    assert waits(a)
    table.tick(DEAD_AFTER_S - 1.0)
    assert waits(a)
    table.tick(1.0)
    assert not waits(a)
