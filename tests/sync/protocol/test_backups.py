"""`recover: replay`, played by hand: who keeps whose copy, and what a newcomer inherits (ADOPT)."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.status import status
from ftopt.sync.protocol.intervals import in_order
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.replica.replica_copy import ReplicaCopy
from tests.sync.protocol.table import Seat, Table
from tests.sync.protocol.test_ledger_scenarios import ENDLESS, commit, job


def keep_copies(*seats: Seat) -> dict[str, str]:
    """Each tells of a copy of what it holds, which is fetched and kept; returns who keeps whose."""
    keepers = {}
    for seat in seats:
        seat.do(seat.machine.say(m.Copied(seat.record.version, (seat.record.version,))))
    for seat in seats:
        seat.take()
        for order in [x for x in seat.asked if isinstance(x, m.Keep)]:
            keepers[order.incarnation_id[0]] = seat.name
            seat.do(seat.machine.say(m.Keeps(order.incarnation_id, order.serial)))
        seat.asked = [x for x in seat.asked if not isinstance(x, m.Keep)]
    return keepers


def successor_of(dead: Seat) -> tuple[Seat, m.Inherit | None]:
    """The process that comes in its place, and what it inherits."""
    seat = dead.die()
    seat.connect()
    orders = [x for x in seat.asked if isinstance(x, m.Inherit)]
    return seat, orders[0] if orders else None


def test_each_is_kept_by_the_next_one_and_that_stays() -> None:
    table, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    assert keep_copies(a, b, c) == {"a": "b", "b": "c", "c": "a"}
    d = Seat(table, "bb")  # between b and c
    d.connect()
    d.fetch(a)
    commit(a, b, c, d, units=2, last_step=4)
    assert keep_copies(a, b, c, d) == {"a": "b", "b": "c", "bb": "c", "c": "a"}


def test_another_process_under_its_name_has_its_units_and_nobody_else() -> None:
    table, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    keep_copies(a, b, c)
    b.use(3)
    lease = b.machine.lease.held
    new, adopted_work = successor_of(b)
    assert adopted_work is not None
    assert (adopted_work.incarnation_id, adopted_work.source, adopted_work.ranges) == (("b", 1), "c", lease)
    assert new.machine.lease.held[: len(lease)] == lease
    assert table.ledger.leases["b", 2] == new.machine.lease.held
    assert ("b", 1) not in table.ledger.leases
    new.fetch(a)
    new.unit_queue.grant(adopted_work.ranges)
    for seat, steps in ((a, 4), (c, 4), (new, 3)):
        seat.use(steps)
        seat.propose(steps + (0 if seat is new else 2))
    for seat in (a, c, new):
        seat.reduce()
    for seat in (a, c, new):
        seat.take()
    assert table.version == 2 and not new.twice
    assert not table.events("held_twice")


@pytest.mark.parametrize("another", [True, False])
def test_who_is_started_again_as_a_spare_inherits_only_if_no_other_spare_takes_its_place(another: bool) -> None:
    table, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    keep_copies(a, b, c)
    if another:
        s = Seat(table, "s", standby=True)
        s.connect()
        s.fetch(a)
    b.use(3)
    b.die()
    new = Seat(table, "b", standby=True)
    new.connect()
    table.tick(1.0)
    new.take()
    assert new.machine.standby == another
    assert any(isinstance(x, m.Inherit) for x in new.asked) != another
    assert bool(table.ledger.leases["b", 2]) != another, "the others would wait for what a spare holds"


def test_nothing_is_inherited_when_a_commit_has_what_the_copy_does_not_know() -> None:
    _, (a, b) = job("a", "b")
    commit(a, b, units=2, last_step=2)
    keep_copies(a, b)
    commit(a, b, units=2, last_step=4)
    assert successor_of(b)[1] is None


def test_nothing_is_inherited_before_the_copy_is_kept() -> None:
    _, (a, b) = job("a", "b")
    commit(a, b, units=2, last_step=2)
    b.do(b.machine.say(m.Copied(1, (1,))))
    assert successor_of(b)[1] is None


def test_nothing_is_inherited_from_a_copy_that_does_not_say_the_version_of_each_fragment() -> None:
    """What it does not speak of could be counted by a later commit, and counted again."""
    for versions in (), (1, 1):
        _, (a, b) = job("a", "b")
        commit(a, b, units=2, last_step=2)
        b.do(b.machine.say(m.Copied(1, versions)))
        a.take()
        assert [x for x in a.asked if isinstance(x, m.Keep)] == []
        commit(a, b, units=2, last_step=4)
        assert successor_of(b)[1] is None


def test_nothing_is_inherited_when_the_keeper_has_gone_away_even_if_it_is_back() -> None:
    _, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    assert keep_copies(a, b, c)["b"] == "c"
    c.cut()
    c.connect()
    assert successor_of(b)[1] is None


def test_what_a_keeper_has_that_leaves_another_one_is_to_keep() -> None:
    _, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    assert keep_copies(a, b, c) == {"a": "b", "b": "c", "c": "a"}
    b.say(m.Bye())
    c.take()
    assert c.pop(m.Keep).incarnation_id == ("a", 1)


def test_hold_nothing_is_inherited_while_its_contribution_may_still_be_committed() -> None:
    table, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    keep_copies(a, b, c)
    for seat in (a, b, c):
        seat.use(2)
        seat.propose(4)
    b.reduce()  # prepared: the attempt may commit without it
    new, adopted_work = successor_of(b)
    assert adopted_work is None
    for seat in (a, c):
        seat.reduce()
    assert table.version == 2
    assert not new.twice and not table.events("held_twice")


def test_a_coordinator_of_a_new_life_knows_of_no_copies() -> None:
    table, (a, b) = job("a", "b")
    commit(a, b, units=2, last_step=2)
    keep_copies(a, b)
    table.restart(journal=True)
    a.connect()
    b.connect()
    assert successor_of(b)[1] is None
    keep_copies(a)


def test_a_replica_that_adopts_work_is_waited_for_like_its_predecessor() -> None:
    """A newcomer is called in at the first proposal; who does steps again is due when the others are."""
    table, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    keep_copies(a, b, c)
    new, adopted_work = successor_of(b)
    assert adopted_work is not None
    new.fetch(a)
    for seat in (new, c):
        seat.say(m.Heartbeat("training", 3, 0.1))
    a.use(2)
    a.propose(4)
    table.wait(1.0)
    new.take()
    assert not new.machine.fragments[0].called_in
    table.wait(1.5)  # the grace
    new.take()
    assert new.machine.fragments[0].called_in


def test_the_units_come_in_the_order_in_which_they_were_granted() -> None:
    held = ((3, 8), (20, 25), (60, 64))  # (40, 42) was given back, (60, 64) granted since
    known = ((3, 5), (20, 25), (5, 8), (40, 42))
    assert in_order(held, known) == ((3, 5), (20, 25), (5, 8), (60, 64))
    assert in_order(held, ()) == held
    assert in_order(held, ((3, 6), (5, 8), (3, 8))) == ((3, 6), (6, 8), (20, 25), (60, 64))  # each once


def test_a_message_that_is_no_copy_is_refused() -> None:
    for meta in ({}, {"copy": "[]", "text": ""}, {"copy": '{"mark": ["a"]}', "text": ""}, {"copy": "[" * 9999}):
        with pytest.raises(ValueError, match="no copy of a replica"):
            ReplicaCopy.of(meta, {})


def test_the_replica_hears_what_has_become_of_its_copy() -> None:
    _, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    keep_copies(a, b, c)
    b.take()
    assert b.pop(m.Kept) == m.Kept(1, "c")
    b.do(b.machine.say(m.Copied(2, (1,))))
    c.take()
    order = c.pop(m.Keep)
    c.do(c.machine.say(m.KeepFailed(order.incarnation_id, order.serial, "it is cut off")))
    b.take()
    assert b.pop(m.Kept) == m.Kept(2, "c", "it is cut off")


def test_one_whose_copies_nobody_keeps_hears_so_once_and_the_next_one_that_comes_keeps_the_newest() -> None:
    table, (a, b) = job("a", "b")
    commit(a, b, units=2, last_step=2)
    keep_copies(a, b)
    b.cut()
    a.take()
    orders = [x for x in a.asked if isinstance(x, m.Kept)]
    assert (orders[-1].serial, orders[-1].keeper) == (0, "")
    a.do(a.machine.say(m.Copied(2, (1,))))
    assert [x.replica for x in table.events("not_kept")] == ["a"]
    (a_told, b_told) = status(table.coordinator, table.now)["replicas"]
    assert (a_told["not_kept"], b_told["not_kept"]) == (True, False)
    b.connect()
    order = b.pop(m.Keep)
    assert (order.incarnation_id, order.serial) == (("a", 1), 2)
    b.do(b.machine.say(m.Keeps(order.incarnation_id, order.serial)))
    a.take()
    assert a.pop(m.Kept) == m.Kept(2, "b")
    assert not status(table.coordinator, table.now)["replicas"][0]["not_kept"]


def test_at_the_end_of_a_job_nobody_is_told_that_its_keeper_has_left() -> None:
    table, (a, b) = job("a", "b")
    commit(a, b, units=2, last_step=2)
    keep_copies(a, b)
    b.say(m.Bye())
    assert table.events("not_kept") == []
    a.do(a.machine.say(m.Copied(2, (1,))))
    assert [x.replica for x in table.events("not_kept")] == ["a"], "it trains on"


def test_a_keeper_that_could_not_fetch_a_copy_is_passed_over_and_the_copy_before_is_good() -> None:
    table, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    keep_copies(a, b, c)
    b.do(b.machine.say(m.Copied(2, (1,))))
    c.take()
    order = c.pop(m.Keep)
    c.do(c.machine.say(m.KeepFailed(order.incarnation_id, order.serial, "damaged")))
    assert [e.data["reason"] for e in table.events("keep_failed")] == ["damaged"]
    assert table.coordinator.members.backups.source_of(table.coordinator.roster.members["b"]) == "c"
    b.do(b.machine.say(m.Copied(3, (1,))))
    a.take()
    assert a.pop(m.Keep).serial == 3


@pytest.mark.parametrize("counted", [True, False])
def test_adopted_steps_that_another_coordinator_has_counted_are_dropped_and_others_are_kept(counted: bool) -> None:
    """Two coordinators at once: the copy is with the first one's, and its replica goes on at the second one."""
    table, (a, b, c, d) = job("a", "b", "c", "d")
    commit(a, b, c, d, units=2, last_step=2)
    assert keep_copies(a, b, c, d)["b"] == "c"
    other = Table(samples=ENDLESS, wants=10)
    other.restart(journal=False)
    for seat in (b, d):
        seat.cut()
        seat.table = other
        seat.connect()
    other.tick(31.0)  # it does not wait for the others any longer
    if not counted:
        b.cut()
    going_on = (b, d) if counted else (d,)
    for seat in going_on:
        seat.take()
        seat.use(2)
        seat.propose(4)
    other.tick(3.0)
    for seat in going_on:
        seat.reduce()
    for seat in going_on:
        seat.take()
    assert other.version == 2
    if counted:
        b.cut()
    b.table = table
    new, inherited = successor_of(b)
    assert inherited is not None and inherited.source == "c"
    new.fetch(a)
    new.unit_queue.grant(inherited.ranges)
    new.use(2)
    new.propose(2)
    new.cut()
    new.table = other
    new.connect()
    new.fetch(d)
    assert [x.reason for x in new.asked if isinstance(x, r.Reset)] == (
        ["steps that this replica has adopted were counted elsewhere: there were two coordinators"] if counted else []
    )
    assert new.machine.incarnation == (0 if counted else 2)
