"""A member whose heartbeats stop in an attempt: the others go on without it before it counts as lost."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table

QUIET_S = 1.0 + 1.0
"""A heartbeat, and the grace of these tables; they count as lost after 3 s."""


def frozen(**settings: float) -> tuple[Table, Seat, Seat, Seat, m.Contribution]:
    """All three are at version 1, when C stops (SIGSTOP), with its contribution on offer and its reducer at work."""
    table = Table(start_replicas=3, grace_s=1.0, dead_after_s=10.0, **settings)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    c.take()
    c.frozen = c.hangs = True
    offered = c.machine.fragments[0].contribution
    assert offered is not None
    return table, a, b, c, offered


def test_a_member_that_stops_in_the_reduction_costs_the_others_a_heartbeat_and_the_grace() -> None:
    table, a, b, c, offered = frozen()
    table.tick(QUIET_S - 0.5)
    assert not table.events("abort")
    table.tick(0.5)
    assert "c: no heartbeat" in table.events("abort")[0].data["reason"]
    assert [a.reduce().quorum.size, b.reduce().quorum.size] == [2, 2]  # at once, without C
    a.take()
    b.take()
    assert a.record.counted == (("a", 1, 5), ("b", 1, 5))
    assert not table.events("lost")
    assert c.machine.fragments[0].contribution == offered  # FREEZE


def test_the_loss_of_a_member_bounds_what_it_has_done_since_its_last_report() -> None:
    table = Table(start_replicas=2, dead_after_s=10.0)
    a, b = table.start("a", "b")
    b.say(m.Heartbeat("training", 1, 0.25, counts=m.Counts(5, 5)))
    b.frozen = True
    table.tick(0.6)
    b.cut()
    (lost,) = table.events("lost")
    assert (lost.data["counts"]["steps"], lost.data["unreported"]) == (5, 3)
    a.cut()
    assert "unreported" not in table.events("lost")[-1].data, "its speed is not known"


def thaw(c: Seat, source: Seat) -> None:
    """It runs again: its reducer ends what is over, and it fetches."""
    stuck = c.pop(r.StartReduce)
    c.frozen = c.hangs = False
    c.say(m.Heartbeat("training", 1, 0.1))
    c.take()
    c.do(c.machine.reduce_failed(0, stuck.quorum.attempt, reason="stopped"))
    c.fetch(source)


def test_it_takes_part_again_with_all_its_steps_when_it_runs_again() -> None:
    table, a, b, c, _ = frozen()
    table.tick(QUIET_S)
    for seat in (a, b):
        seat.reduce()
    for seat in (a, b):
        seat.take()
    thaw(c, a)
    assert c.machine.counted_step(c.record) == 0  # its steps are pending
    for seat in (a, b, c):
        seat.propose(10)
    for seat in (a, b, c):
        seat.reduce()
    a.take()
    assert a.record.counted == (("a", 1, 10), ("b", 1, 10), ("c", 1, 10))
    assert len(table.events("abort")) == 1


def test_who_was_left_out_for_its_silence_is_waited_for_twice_as_long_the_next_time() -> None:
    table, a, b, c, _ = frozen()
    table.tick(QUIET_S)
    for seat in (a, b):
        seat.reduce()
    for seat in (a, b):
        seat.take()
    thaw(c, a)
    for seat in (a, b, c):
        seat.propose(10)
    c.frozen = True
    table.tick(2 * QUIET_S - 1.0)
    for seat in (a, b, c):
        seat.reduce()
    assert table.version == 2
    assert len(table.events("abort")) == 1


def test_a_member_that_stops_after_it_has_prepared_costs_nothing() -> None:
    table, a, b, c, _ = frozen()
    c.reduce()
    a.reduce()
    b.reduce()
    assert table.version == 1
    table.tick(QUIET_S)
    assert not table.events("abort")


def test_a_member_that_is_heard_is_waited_for_however_long_it_reduces() -> None:
    table, _, _, c, _ = frozen()
    c.frozen = False
    table.tick(5 * QUIET_S)
    assert not table.events("abort")


def test_nobody_is_left_out_for_its_silence_when_too_few_would_be_left() -> None:
    table, *_ = frozen(min_replicas=3)
    table.tick(QUIET_S + 1.0)
    assert not table.events("abort")
    table.tick(10.0 - QUIET_S)
    assert "c was lost" in table.events("abort")[0].data["reason"]


def test_of_two_that_stop_one_after_the_other_both_are_left_out() -> None:
    table, a, b, c, _ = frozen()
    b.take()
    table.tick(1.0)
    b.frozen = b.hangs = True
    table.tick(QUIET_S)
    assert a.reduce().quorum.size == 1
    assert [x.data["reason"][0] for x in table.events("abort")] == ["c", "b"]
    assert c.conn is not None


def test_a_member_that_is_silent_when_the_attempt_begins_is_left_out_at_once() -> None:
    """The coordinator is called when it asks for it, and heartbeats change nothing."""
    table = Table(start_replicas=3, grace_s=1.0, heartbeat_s=0.5, dead_after_s=10.0)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    for seat in (a, b, c):
        seat.reduce()
    for seat in (a, b, c):
        seat.take()
    a.propose(10)
    a.frozen = True
    b.propose(10)
    began = heard = table.now
    while not table.events("abort") and table.now < began + 9.0:
        table.now = round(table.now + 0.01, 3)
        if table.now >= heard + 0.5:
            heard = table.now
            for seat in (b, c):
                seat.say(m.Heartbeat("training", 10, 0.1))
        if table.now >= table.coordinator.deadline_s():
            table.do(table.coordinator.tick(table.now))
        b.take()
        c.take()
    (abort,) = table.events("abort")
    assert "no heartbeat" in abort.data["reason"] and table.now - began < QUIET_S
