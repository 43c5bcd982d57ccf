"""What goes wrong with samples when a rule of the ledger is missing, played by hand with the real machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import intersect, size
from ftopt.sync.protocol.ledger.ledger import STRIDE
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.resumed import Held
from ftopt.sync.protocol.samples import Samples
from tests.sync.protocol.table import Seat, Table

ENDLESS = Samples(samples=1000, batch_size=1)


def job(*names: str, samples: Samples = ENDLESS, wants: int = 10, **settings: Any) -> tuple[Table, list[Seat]]:
    """A job whose members hold ``wants`` units each: ``names[0]`` the first ones, and so on."""
    table = Table(samples=samples, wants=wants, start_replicas=len(names), **settings)
    return table, table.start(*names)


def commit(*seats: Seat, units: int, last_step: int) -> None:
    """An outer step in which each uses so many units."""
    for seat in seats:
        seat.use(units)
    for seat in seats:
        seat.propose(last_step)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


def test_members_are_granted_what_they_have_used_in_the_order_of_their_ids() -> None:
    table, (a, b) = job("a", "b")
    assert (a.machine.lease.held, b.machine.lease.held) == (((0, 10),), ((10, 20),))
    b.use(2)
    a.use(4)
    b.propose(2)  # a slow one has used less, and gets less
    a.propose(4)
    b.reduce()
    a.reduce()
    a.take()
    b.take()
    assert a.record.done == b.record.done == ((0, 4), (10, 12))
    assert a.machine.lease.held == ((4, 10), (20, 24))
    assert b.machine.lease.held == ((12, 20), (24, 26))
    (decided,) = table.events("decide")
    assert decided.data["ranges"] == {"a": [(0, 4)], "b": [(10, 12)]}
    assert decided.data["done_to"] == 4


def test_a_replica_that_runs_short_asks_and_is_not_granted_twice() -> None:
    _, (a, b) = job("a", "b")
    a.use(9)
    a.do(a.machine.ask())
    a.do(a.machine.ask())
    a.take()
    assert a.machine.lease.held == ((0, 10), (20, 30))
    assert b.machine.lease.held == ((10, 20),)


def test_gone_alone_releases_what_a_suspect_holds() -> None:
    table, (a, b) = job("a", "b", evict_after_s=20.0)
    a.use(3)
    a.cut()
    b.use(10)
    b.do(b.machine.ask())
    b.take()
    assert b.machine.lease.held == ((10, 30),)
    a.connect()
    a.propose(3)
    b.propose(10)
    a.reduce()
    b.reduce()
    assert table.ledger.done == ((0, 3), (10, 20))
    b.take()
    a.cut()
    table.tick(21.0)
    b.do(b.machine.ask())
    b.take()
    assert b.unit_queue.queued == 20
    assert b.machine.lease.held[0] == (3, 10), "what is released is granted first"


def test_a_gone_one_comes_back_without_its_units() -> None:
    table, (a, b) = job("a", "b", evict_after_s=20.0)
    a.use(3)
    a.cut()
    table.tick(21.0)
    a.open()
    a.take()
    assert a.pop(r.Reset)
    assert (a.unit_queue.queued, a.unit_queue.offer(), a.machine.lease.held) == (0, (), ())
    a.connect()
    assert a.machine.incarnation == 2
    assert a.machine.lease.held == (), "nobody holds units before it holds a state"
    a.fetch(b)
    assert not set(a.machine.lease.held) & set(b.machine.lease.held)
    assert a.machine.lease.held == ((0, 10),), "they were free by then"


def test_limbo_a_new_coordinator_grants_nothing_that_one_who_is_not_heard_may_hold() -> None:
    table, (a, b) = job("a", "b")
    table.restart(journal=True)
    b.open()
    table.tick(4.0)
    b.take()
    assert table.coordinator.running
    b.use(10)
    b.do(b.machine.ask())
    b.take()
    assert b.machine.lease.held == ((10, 20), (20 + STRIDE, 30 + STRIDE))
    a.connect()
    assert table.ledger.leases[a.machine.identity.replica, 1] == ((0, 10),)
    assert table.ledger.free() == ((20, 20 + STRIDE),)
    b.do(b.machine.ask())
    b.take()
    assert b.machine.lease.held == ((10, 40), (20 + STRIDE, 30 + STRIDE)), "now it is known that nobody has these"


def test_cursor_a_new_coordinator_goes_on_behind_all_that_was_ever_granted() -> None:
    for journal in (True, False):
        table, (a, b) = job("a", "b")
        commit(a, b, units=5, last_step=5)
        told = b.machine.lease.cursor
        assert told == 20 + STRIDE
        table.restart(journal=journal)
        b.open()
        table.tick(4.0 if journal else 31.0)  # A is away; without the journal B's word counts
        b.take()
        b.use(10)
        b.do(b.machine.ask())
        b.take()
        assert b.machine.lease.held[-1] == (told, told + 10)


def test_done_is_also_what_a_member_has_used_that_died_after_it_had_prepared() -> None:
    table, (a, b) = job("a", "b", evict_after_s=20.0)
    for seat in (a, b):
        seat.use(5)
        seat.propose(5)
    a.reduce()
    a.cut()
    b.reduce()
    b.take()
    assert b.record.done == table.ledger.done == ((0, 5), (10, 15))
    table.tick(21.0)
    assert table.ledger.free() == ((5, 10),)


def test_total_a_grant_that_was_lost_with_its_connection_is_free_again() -> None:
    table, (a, b) = job("a", "b")
    a.use(9)
    a.do(a.machine.ask())
    a.cut()  # before the grant has come
    assert table.ledger.leases["a", 1] == ((0, 10), (20, 30))
    a.connect()
    assert a.machine.lease.held == table.ledger.leases["a", 1] == ((0, 10),)
    b.do(b.machine.ask())
    b.take()
    assert b.machine.lease.held == ((10, 30),)


def test_fence_who_is_granted_a_dead_ones_units_has_heard_of_the_death_before() -> None:
    """Without its journal a new coordinator learns from B that A is gone: A's claim is not heard."""
    table, (a, b) = job("a", "b", evict_after_s=20.0)
    a.use(3)
    a.cut()
    table.tick(21.0)
    b.use(10)
    b.do(b.machine.ask())
    kinds = [type(x) for x in b.inbox if isinstance(x, m.RosterUpdate | m.Grant)]
    assert kinds == [m.RosterUpdate, m.Grant]
    b.take()
    assert b.machine.lease.held == ((0, 20),)
    table.restart(journal=False)
    a.open()
    b.open()
    table.tick(1.0)
    a.take()
    assert a.pop(r.Reset)
    assert table.ledger.leases["b", 1] == ((0, 20),)


def test_hold_what_an_undecided_attempt_has_used_is_not_granted_when_its_owner_is_gone() -> None:
    table, (a, b, c) = job("a", "b", "c", evict_after_s=4.0)
    for seat in (a, b):
        seat.use(5)
        seat.propose(5)
    table.tick(3.0)  # C is at work, and not waited for any longer
    a.reduce()
    a.cut()
    table.tick(4.0)
    assert table.events("gone")
    assert table.coordinator.rounds[0].attempt is not None
    assert table.ledger.free() == ((5, 10),)
    c.use(10)
    c.do(c.machine.ask())
    c.take()
    assert c.machine.lease.held == ((5, 10), (20, 35))
    b.reduce()
    b.take()
    assert b.record.done == ((0, 5), (10, 15))


def test_source_nobody_takes_up_done_marks_of_a_history_that_was_rolled_back() -> None:
    table, (a, b, c) = job("a", "b", "c", evict_after_s=20.0)
    a.use(5)
    a.propose(5)
    table.tick(3.0)  # B and C hang
    a.reduce()
    a.take()
    served = a.machine.fragments[0].serves()
    assert served is not None and served.done == ((0, 5),)
    a.cut()
    for seat in (b, c):
        seat.take()
        assert seat.pop(r.Fetch).position.version == 1
    c.do(c.machine.fetch_failed(0))
    table.tick(21.0)  # A is gone; B may have version 1 by now
    b.cut()
    b.open()  # it has not, and its fetch goes on
    assert table.events("rollback")
    b.connect()
    c.connect()
    table.tick(1.0)
    b.take()
    assert not b.machine.install(served)
    assert table.ledger.done == ()
    assert table.ledger.free() != ()
    assert table.ledger.free()[0] == (0, 10), "what the lost version had used is used again"


def test_what_a_void_or_spoilt_contribution_has_used_is_not_handed_on() -> None:
    """A batch that gives no number would give none to the next one, either."""
    _, (a, b) = job("a", "b")
    a.use(5)
    b.use(5)
    corrupted = m.Contribution(0, 0, 5, 5, 0.0, finite=False, ranges=a.unit_queue.offer())
    a.do(a.machine.propose(corrupted))
    b.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    assert a.record.done == ((0, 5), (10, 15))
    assert a.unit_queue.offer() == ()


def test_an_outlier_keeps_what_it_has_used_with_its_steps() -> None:
    table, seats = job("a", "b", "c")
    for seat, norm in zip(seats, (1.0, 1.0, 1e6), strict=True):
        seat.use(5)
        offer = m.Contribution(0, 0, 5, 5, 5.0, norm=norm, excess=norm, alone=norm, ranges=seat.unit_queue.offer())
        seat.do(seat.machine.propose(offer))
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()
    assert table.events("outlier")
    assert seats[2].record.done == ((0, 5), (10, 15))
    assert seats[2].unit_queue.offer() == ((20, 25),)


def test_a_leaver_gives_back_what_it_has_not_used() -> None:
    table, (a, b) = job("a", "b")
    a.use(5)
    b.use(5)
    a.do(a.machine.say(m.Leaving()))
    a.propose(5)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    a.say(m.Bye())
    b.take()
    assert table.ledger.free() == ((5, 10),)
    assert b.record.done == ((0, 5), (10, 15))


def test_at_the_end_of_the_data_the_rest_of_one_who_is_away_is_waited_for_and_then_granted() -> None:
    samples = Samples(samples=20, batch_size=1, epochs=1)
    table, (a, b) = job("a", "b", samples=samples, evict_after_s=5.0)
    commit(a, b, units=8, last_step=8)
    b.cut()
    a.use(2)
    a.propose(10)
    a.reduce()
    a.do(a.machine.ask())
    a.take()
    assert (a.unit_queue.queued, a.machine.lease.held) == (0, ())
    table.tick(4.0)
    assert not table.events("gone")
    table.tick(4.0)
    assert [x.replica for x in table.events("gone")] == ["b"]
    a.take()
    assert a.machine.lease.held == ((18, 20),)
    a.use(2)
    a.propose(12)
    a.reduce()
    a.take()
    assert a.record.done == ((0, 20),)
    assert [x.data["epoch"] for x in table.events("epoch_done")] == [0]
    assert len(table.events("data_ended")) == 1


def one_unit_left(**settings: Any) -> tuple[Table, Seat, Seat]:
    """Two fragments; fragment 0 has version 1, a holds the last unit, and as long as ``evict_after_s`` to use it."""
    table = Table(2, samples=Samples(samples=4, batch_size=1, epochs=1), wants=2, **{"evict_after_s": 5.0, **settings})
    a, b = table.start("a", "b")
    a.use(1)
    b.use(2)
    a.propose(1)
    b.propose(2)
    for seat in (a, b):
        seat.reduce()
    for seat in (a, b):
        seat.take()
    return table, a, b


def test_who_waits_for_its_peers_in_a_round_of_any_fragment_is_not_given_up_for_what_it_does_not_do() -> None:
    table, a, b = one_unit_left(grace_s=8.0)
    b.do(b.machine.ask())
    b.take()
    assert (a.machine.lease.held, b.machine.lease.held) == (((1, 2),), ())
    a.propose(1, fragment=1)
    table.tick(8.0)
    assert not a.got(m.Quorum) and not table.events("gone"), "B comes late"
    table.tick(1.0)
    a.reduce()
    table.tick(5.0)
    assert not table.events("gone")
    table.tick(2.0)  # nobody keeps it from training
    assert [x.replica for x in table.events("gone")] == ["a"]


def test_who_has_trained_while_an_attempt_was_under_way_has_its_whole_time_when_it_begins_to_wait() -> None:
    table, a, b = one_unit_left(grace_s=8.0)
    b.do(b.machine.ask())
    b.take()
    a.propose(1, fragment=1)
    b.propose(2, fragment=1)
    a.reduce()  # b's reducer hangs, and a trains on
    table.tick(4.0)
    a.say(m.Heartbeat("training", 2, 0.1))
    table.tick(6.9)  # evict_after_s has passed since, and all of it waiting
    assert not table.events("gone")
    table.tick(30.0)
    assert [x.replica for x in table.events("gone")][:1] == ["a"]


def test_who_fetches_what_its_peers_have_committed_is_not_given_up_for_what_it_does_not_do_meanwhile() -> None:
    table, a, b = one_unit_left()
    a.cut()
    b.propose(2, fragment=1)
    table.tick(2.0)
    b.reduce()
    b.take()
    assert b.machine.fragments[1].record.version == 1
    b.do(b.machine.ask())
    b.take()
    a.connect()
    table.tick(9.0)  # longer than evict_after_s
    a.fetch(b, 1)
    table.tick(4.0)
    assert a.machine.lease.held == ((1, 2),) and not table.events("gone")
    table.tick(4.0)
    assert [x.replica for x in table.events("gone")] == ["a"]


def test_who_fetches_for_ever_is_given_up_at_the_end_of_the_data() -> None:
    table, a, b = one_unit_left(evict_after_s=20.0)
    a.cut()
    b.propose(2, fragment=1)
    table.tick(2.0)
    b.reduce()
    b.take()
    b.do(b.machine.ask())
    b.take()
    a.connect()
    table.tick(38.0)
    assert not table.events("gone"), "twice evict_after_s"
    table.tick(6.0)
    assert [x.replica for x in table.events("gone")] == ["a"]


def test_who_was_in_an_attempt_that_has_failed_is_not_given_up_before_its_reducer_can_be_free() -> None:
    table, (a, b, c) = job(
        "a", "b", "c", samples=Samples(samples=3, batch_size=1, epochs=1), wants=1, evict_after_s=3.0
    )
    for seat in (a, b, c):
        seat.use(1)
    c.propose(1)
    table.tick(3.0)
    c.reduce()
    c.take()
    for seat in (a, b):
        seat.fetch(c)
        seat.propose(1)
    c.propose(1)
    c.do(c.machine.ask())
    table.tick(6.0)  # nothing moves
    a.take()
    a.do(a.machine.reduce_failed(0, a.pop(r.StartReduce).quorum.attempt, reason="time-out"))
    table.tick(1.0)
    assert not table.events("gone")
    for seat in (b, c, a):
        seat.reduce()
    assert len(table.events("data_ended")) == 1


def test_the_last_unit_goes_to_who_was_given_up_least_often() -> None:
    """Two that hang come back each time, and do not pass it to each other past one that hung once, long ago."""
    table, (a, b, c) = job("a", "b", "c", samples=Samples(samples=1, batch_size=1, epochs=1), evict_after_s=5.0)
    table.coordinator.assignment.gave_up("c")
    held = []
    for seconds in (7.0, 7.0, 12.0, 12.0, 0.0):
        held += [x.name for x in (a, b, c) if x.machine.lease.held]
        table.tick(seconds)  # nobody does anything
        for seat in (a, b, c):
            if seat.conn is None:
                seat.connect()
                seat.fetch(next(x for x in (a, b, c) if x is not seat and x.conn is not None))
            seat.take()
    assert held == ["a", "b", "a", "b", "c"]


def test_who_was_given_up_has_twice_as_long_the_next_time() -> None:
    """All are slow, as on a machine that has too much to do: if each lost the last unit, the data would never end."""
    table, (a, b) = job("a", "b", samples=Samples(samples=1, batch_size=1, epochs=1), evict_after_s=5.0)
    for holder, other in ((a, b), (b, a)):
        assert holder.machine.lease.held == ((0, 1),)
        table.tick(7.0)
        holder.connect()
        holder.fetch(other)
        other.take()
    assert a.machine.lease.held == ((0, 1),)
    table.tick(9.0)
    assert [x.replica for x in table.events("gone")] == ["a", "b"]
    a.use(1)
    a.propose(2)
    table.tick(3.0)
    a.reduce()
    assert len(table.events("data_ended")) == 1


def test_a_newcomer_is_granted_units_when_it_holds_every_fragment() -> None:
    """One that dies while it fetches takes none with it."""
    table, (a, _) = job("a", "b", fragments=2)
    c = Seat(table, "c", "other")
    c.connect()
    c.do(c.machine.ask())
    c.fetch(a, 0)
    assert not table.ledger.leases.get(("c", 1))
    c.fetch(a, 1)
    assert c.machine.lease.held == ((20, 30),)


def test_a_joiner_that_dies_before_its_first_step_is_not_waited_for_at_the_end_of_the_data() -> None:
    """Nothing is pending on it: giving it up costs nobody a step, and ``evict_after_s`` is for those who have some."""
    table, (a, b) = job("a", "b", samples=Samples(samples=40, batch_size=1, epochs=1))
    c = Seat(table, "c", "other")
    c.connect()
    c.fetch(a)
    assert size(table.ledger.leases[("c", 1)]) > 0
    c.cut()
    step = 0
    while a.unit_queue.queued or b.unit_queue.queued:
        step += 10
        for seat in (a, b):
            seat.use(seat.unit_queue.queued)
        for seat in (a, b):
            seat.propose(step)
        for seat in (a, b):
            seat.reduce()
        for seat in (a, b):
            seat.take()
    assert a.record.done == b.record.done and size(a.record.done) == 40 - size(table.ledger.leases[("c", 1)])
    assert not table.events("gone")
    table.tick(4.0)
    assert [x.replica for x in table.events("gone")] == ["c"]
    a.take()
    b.take()
    assert a.unit_queue.queued + b.unit_queue.queued == 40 - size(a.record.done)


@pytest.mark.parametrize("journal", [None, True])
def test_who_comes_when_the_data_have_ended_and_all_have_left_does_not_train_once_more(journal: bool | None) -> None:
    """A replica that was killed at the end, and is started again: it would begin with version 0, for nobody."""
    samples = Samples(samples=20, batch_size=1, epochs=1)
    table, (a, b) = job("a", "b", samples=samples)
    commit(a, b, units=10, last_step=10)
    for seat in (a, b):
        seat.do(seat.machine.say(m.Leaving()))
        seat.say(m.Bye())
    if journal:
        table.restart(journal=True)
    for _ in range(2):
        c = Seat(table, "c", "other")
        c.open()
        table.tick(11.0)
        c.take()
        assert "the job has ended" in c.pop(r.GiveUp).reason
    assert len(table.events("start")) == 1
    table.samples = replace(samples, samples=30)
    d = Seat(table, "d")  # other data are another job
    d.open()
    table.tick(11.0)
    d.take()
    assert d.record.version == 0


def test_used_by_two_after_all_is_told_and_the_steps_are_kept() -> None:
    """Without a journal, beyond recovery_s, of one whose name nobody had kept: nothing can be promised."""
    table, (a, b) = job("a", "b")
    a.use(4)
    table.restart(journal=False)
    b.machine.known.roster.clear()
    b.machine.lease.cursor = 0
    b.machine.lease.held = ()
    b.unit_queue.reset()
    b.connect()
    assert b.machine.lease.held == ((0, 10),)
    a.connect()
    (told,) = table.events("held_twice")
    assert told.data["ranges"] == ((0, 10),)
    b.use(2)
    b.propose(2)
    table.tick(5.0)
    b.reduce()
    b.take()
    a.fetch(b)
    assert a.twice == ((0, 2),)
    assert a.unit_queue.offer() == ((2, 4),)


def test_the_last_units_are_done_also_when_no_step_that_used_them_was_finite() -> None:
    """Nobody has any weight, so nothing would ever come of the round; and without units nobody trains on."""
    table, (a,) = job("a", samples=Samples(samples=4, batch_size=1, epochs=1), wants=4)
    commit(a, units=2, last_step=2)
    a.use(1)
    weightless = m.Contribution(0, 1, 0, 3, 0.0, finite=False, ranges=a.unit_queue.offer())
    a.do(a.machine.propose(weightless))
    a.take()
    assert a.record.version == 1, "there is another unit to train on"
    a.use(1)
    a.do(a.machine.propose(m.Contribution(0, 1, 0, 4, 0.0, finite=False, ranges=a.unit_queue.offer())))
    a.reduce()
    a.take()
    assert a.record.done == ((0, 4),)
    assert len(table.events("data_ended")) == 1


def test_one_whose_last_steps_were_not_finite_still_waits_for_no_hung_one() -> None:
    """It has nothing left to use: that somebody holds the rest and does nothing with it must be seen."""
    samples = Samples(samples=8, batch_size=1, epochs=1)
    table, (a, b) = job("a", "b", samples=samples, wants=4, evict_after_s=5.0)
    a.use(4)
    b.cut()
    a.do(a.machine.propose(m.Contribution(0, 0, 0, 4, 0.0, finite=False, ranges=a.unit_queue.offer())))
    a.reduce()
    a.take()
    assert a.record.done == ((0, 4),)
    table.tick(10.0)
    a.take()
    assert ("b", 1) not in table.coordinator.roster.incarnation_ids()
    assert a.machine.lease.held == ((4, 8),)


def test_who_was_told_that_nothing_is_left_asks_again_on_another_connection() -> None:
    """What it has asked is forgotten with the connection, and its lease is full of units that are used already."""
    table, (a, b) = job("a", "b", samples=Samples(samples=20, batch_size=1, epochs=1))
    a.use(10)
    a.do(a.machine.ask())
    a.take()
    table.do(table.coordinator.members.gone(("b", 1), "by hand"))
    a.cut()
    a.connect()
    assert a.unit_queue.queued == 0 and a.heard_dry[-2:] == [True, False]
    a.do(a.machine.ask())
    a.take()
    assert a.machine.lease.held == ((0, 20),)
    assert b.conn is None


def test_adopt_a_coordinator_that_lives_on_keeps_the_units_of_a_missing_replica_for_its_adopter() -> None:
    """All have died; a comes out of a checkpoint before b, who takes over what c had pending."""
    table, (a, b, c) = job("a", "b", "c")
    commit(a, b, c, units=2, last_step=2)
    record, pending = a.record, ((22, 24),)
    assert c.machine.lease.held[0][0] == 22
    seats = {seat.name: seat.die() for seat in (a, b, c)}
    back, gone, adopted_by = {"a": 1, "b": 1}, {"c": 1}, {"c": "b"}
    for name in ("a", "b"):
        used = pending if name == "b" else ()
        held = Held(name, 1, 1, gone, back, adopted_by, records=(record,), samples=ENDLESS, cursor=30, used=used)
        seats[name].machine.resume(held)
    seats["a"].connect()
    seats["a"].do(seats["a"].machine.ask())
    seats["a"].take()
    assert not intersect(seats["a"].machine.lease.held, pending)
    seats["b"].connect()
    assert not table.events("held_twice")
    assert pending[0] in seats["b"].machine.lease.held


def test_what_a_newer_checkpoint_holds_is_nobody_elses_when_one_that_resumed_from_an_older_one_is_lost() -> None:
    """b has died; a process that resumes from its older checkpoint is let in and dies; then one resumes from its newer
    one. What b was granted between the two was free for a while."""
    table, (a, b) = job("a", "b")
    older = checkpoint_of(b)
    commit(a, b, units=2, last_step=2)
    newer = checkpoint_of(b)
    assert newer.queue != older.queue
    b = b.die()
    b.machine.resume(older)
    b.machine.lease.wants = 0
    b.connect()
    b = b.die()
    a.do(a.machine.ask())
    a.take()
    assert not intersect(a.machine.lease.held, newer.queue)
    b.machine.resume(newer)
    b.connect()
    assert not table.events("held_twice")
    a.do(a.machine.ask())
    a.take()
    assert not intersect(a.machine.lease.held, b.machine.lease.held)


def checkpoint_of(seat: Seat) -> Held:
    machine = seat.machine
    return Held(
        seat.name,
        machine.incarnation,
        machine.epoch,
        {},
        dict(machine.known.roster),
        records=(seat.record,),
        samples=ENDLESS,
        cursor=machine.lease.cursor,
        queue=machine.lease.held,
    )
