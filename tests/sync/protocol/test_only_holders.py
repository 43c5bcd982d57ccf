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
    table, a, _ = alone(proposes=True)
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


def held_alone(*, names: tuple[str, ...] = ("a", "b")) -> tuple[Table, list[Seat]]:
    """B has made version 1, and dies at once; nobody else could fetch it."""
    table = Table(start_replicas=len(names))
    seats = table.start(*names)
    b = seats[1]
    b.propose(5)
    table.tick(GRACE_S + 1.0)
    b.reduce()
    b.die()
    for seat in seats:
        if seat is not b:
            seat.take()
            seat.do(seat.machine.fetch_failed(0))
            seat.take()
    return table, [x for x in seats if x is not b]


def notices(seat: Seat) -> list[str]:
    return [x.text for x in seat.asked if isinstance(x, r.Notice)]


def back(table: Table, seat: Seat) -> None:
    """It connects again after a rollback."""
    if seat.conn is None:
        seat.connect()


def test_a_version_that_was_lost_with_its_only_holder_keeps_the_others_from_committing_for_recovery_s() -> None:
    table, (a, c) = held_alone(names=("a", "b", "c"))
    table.tick(RECOVERY_S - 1.0)
    assert not table.events("rollback")
    table.tick(2.0)
    assert table.events("gone")[0].data["reason"].startswith("its connection has ended")
    assert [x.version for x in table.events("rollback")] == [1]
    for seat in (a, c):
        back(table, seat)
    for seat in (a, c):
        seat.take()
        seat.propose(10)
    for seat in (a, c):
        seat.reduce()
    a.take()
    assert a.record.version == 1
    assert a.record.counted == (("a", 1, 10), ("c", 1, 10))  # nothing of theirs is lost


def test_losses_of_all_connections_do_not_make_the_wait_for_it_begin_again() -> None:
    table, seats = held_alone(names=("a", "b", "c"))
    for _ in range(7):  # 4 s in each, of which 1 s without anybody
        table.tick(3.0)
        assert not table.events("rollback")
        for seat in seats:
            seat.cut()
        table.tick(1.0)
        for seat in seats:
            seat.connect()
    table.tick(RECOVERY_S - 7 * 3.0 - 1.0)
    assert not table.events("rollback")
    table.tick(2.0)
    assert [x.replica for x in table.events("gone")] == ["b"]
    assert [x.version for x in table.events("rollback")] == [1]


def test_time_without_anybody_is_no_absence() -> None:
    table, (a,) = held_alone()
    table.tick(3.0)
    a.cut()
    table.tick(10 * RECOVERY_S)
    a.connect()
    table.tick(RECOVERY_S - 4.0)
    assert not table.events("gone")
    table.tick(2.0)
    assert [x.replica for x in table.events("gone")] == ["b"]


def test_those_who_are_here_are_told_what_is_waited_for_and_how_long_at_most_once() -> None:
    table, (a,) = held_alone()
    table.tick(5.0)
    a.take()
    d = Seat(table, "d")
    d.connect()
    table.tick(5.0)
    for seat in (a, d):
        seat.take()
        assert len([x for x in notices(seat) if "newest version, and b may" in x]) == 1
    assert "30 s at most" in notices(a)[-1]
    assert [dict(x.data) for x in table.events("awaited")] == [{"for": ["b"], "at_most_s": RECOVERY_S}]
    table.tick(RECOVERY_S)
    a.take()
    assert "goes on from what the replicas hold" in notices(a)[-1]


def test_an_only_holder_that_fell_silent_may_be_cut_off_and_is_waited_for_as_long_as_any_other() -> None:
    table = Table()
    a, b = table.start("a", "b")
    b.propose(5)
    table.tick(GRACE_S + 1.0)
    b.reduce()
    b.frozen = True
    a.take()
    table.tick(DEAD_AFTER_S + 1.0)
    a.do(a.machine.fetch_failed(0))
    table.tick(GONE_AFTER_S - 10.0)
    assert not table.events("rollback")
    a.take()
    assert "newest version, and b may" in notices(a)[-1]
    b.connect()
    table.tick(1.0)
    a.fetch(b)
    assert a.record.version == 1


def test_an_only_holder_is_waited_for_while_nobody_else_holds_anything() -> None:
    """It may come back from a checkpoint; a newcomer would start the job anew."""
    table = Table(start_replicas=1)
    (b,) = table.start("b")
    b.propose(5)
    b.reduce()
    b.die()
    d = Seat(table, "d")
    d.connect()
    table.tick(GONE_AFTER_S - 10.0)
    assert not table.events("rollback")
    assert "newest version, and b may" in notices(d)[-1]


def test_fetches_that_fail_again_and_again_become_rare_and_another_source_is_tried_at_once() -> None:
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    b.propose(5)
    table.tick(GRACE_S + 1.0)
    b.reduce()
    for seat in (a, b, c):
        seat.take()
    tries = 0
    for _ in range(600):
        table.tick(1.0)
        a.take()
        if any(isinstance(x, r.Fetch) for x in a.asked):
            assert a.pop(r.Fetch).sources == ("b",)
            a.do(a.machine.fetch_failed(0))
            tries += 1
    assert tries < 80
    c.fetch(b)
    a.take()
    assert sorted(a.pop(r.Fetch).sources) == ["b", "c"]


def test_a_job_whose_first_replica_dies_before_another_has_its_state_starts_anew_without_it() -> None:
    table = Table(start_replicas=3, start_s=5.0)
    a, b, c = seats = [Seat(table, name, initial=name) for name in "abc"]
    for seat in seats:
        seat.open()
    for seat in seats:
        seat.take()
    assert [seat.machine.fragments[0].record is not None for seat in seats] == [True, False, False]
    a.die()
    for seat in (b, c):
        seat.take()
        seat.do(seat.machine.fetch_failed(0))
    table.tick(RECOVERY_S - 1.0)
    assert "a" in table.coordinator.roster.members, "it may come back with what it had loaded"
    table.tick(2.0)
    assert "a" not in table.coordinator.roster.members
    for seat in (b, c):
        seat.take()
        if seat.conn is None:
            seat.open()
    table.tick(6.0)
    for seat in (b, c):
        seat.take()
    assert any(seat.machine.fragments[0].record is not None for seat in (b, c)), "version 0 of another start"
