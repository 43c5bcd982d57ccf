"""`on_loss: fail`, played by hand: what is a loss, and that it ends the job for all, once and for good (LOSS)."""

from __future__ import annotations

import pytest

from ftopt.errors import UserError
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.policy import FaultPolicy
from tests.sync.protocol.table import Seat, Table

DEAD_AFTER_S = 3.0
RECOVERY_S = 30.0
"""Of the table."""


def strict() -> tuple[Table, list[Seat]]:
    """Three replicas at version 1."""
    table = Table(on_loss="fail", start_replicas=3)
    seats = table.start("a", "b", "c")
    for seat in seats:
        seat.propose(5)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()
    assert table.version == 1
    return table, seats


def told(seat: Seat) -> m.JobFailed | None:
    """What it was told of the job's failure."""
    seat.take()
    found = [x for x in seat.asked if isinstance(x, m.JobFailed)]
    return found[-1] if found else None


def live(table: Table, seconds: float) -> None:
    """Lets time pass; the connected take in what they are sent."""
    end = table.now + seconds
    while table.now < end:
        table.tick(min(1.0, end - table.now))
        for seat in list(table.seats_by_conn.values()):
            seat.take()


def test_a_replica_that_dies_ends_the_job_for_all_after_dead_after_s() -> None:
    table, (a, b, c) = strict()
    live(table, 1.0)
    b.cut()
    live(table, DEAD_AFTER_S - 0.5)
    assert told(a) is None
    live(table, 1.0)
    for seat in (a, c):
        failed = told(seat)
        assert failed is not None
        assert (failed.replica, failed.incarnation, failed.versions, failed.inner_step) == ("b", 1, (1,), 5)
        assert seat.conn is None and seat.machine.over
    assert len(table.events("job_failed")) == 1
    assert table.coordinator.deadline_s() == float("inf")


def test_one_that_is_back_within_dead_after_s_is_no_loss() -> None:
    table, (a, b, _) = strict()
    b.cut()
    live(table, DEAD_AFTER_S - 0.5)
    b.connect()
    live(table, 60.0)
    assert told(a) is told(b) is None


@pytest.mark.parametrize("restarted", [True, False])
def test_one_that_is_given_up_as_soon_as_it_counts_as_lost_is_a_loss(restarted: bool) -> None:
    table = Table(on_loss="fail", evict_after_s=DEAD_AFTER_S)
    a, b = table.start("a", "b")
    if restarted:
        table.restart(journal=True)
        a.connect()
    else:
        b.cut()
    live(table, DEAD_AFTER_S + 2.0)
    failed = told(a)
    assert failed is not None and failed.replica == "b"


def test_one_that_is_silent_is_a_loss() -> None:
    table, (a, b, _) = strict()
    b.frozen = True
    live(table, 2 * DEAD_AFTER_S + 2.0)
    assert told(a) is not None


def test_one_that_is_started_again_is_a_loss_and_is_turned_away() -> None:
    _table, (a, b, _) = strict()
    new = b.die()
    new.connect()
    for seat in (a, new):
        failed = told(seat)
        assert failed is not None and failed.replica == "b"
        assert "another one has come in its place" in failed.why


def test_one_that_has_finished_is_no_loss_however_it_goes() -> None:
    table, (a, b, c) = strict()
    b.do(b.machine.say(m.Finished()))
    b.cut()
    c.do(c.machine.say(m.Finished()))
    c.do(c.machine.say(m.Leaving()))
    c.do(c.machine.say(m.Bye()))
    assert c.conn is None and c.machine.over
    live(table, 60.0)
    assert told(a) is None
    b.connect()
    b.do(b.machine.say(m.Bye()))
    assert b.machine.over


def test_one_that_leaves_before_its_end_is_a_loss_if_others_train_on() -> None:
    table, (a, b, c) = strict()
    for seat in (b, c):
        seat.do(seat.machine.say(m.Leaving()))
        seat.say(m.Bye())
    live(table, 1.0)
    assert told(a) is None
    live(table, DEAD_AFTER_S)
    failed = told(a)
    assert failed is not None and (failed.replica, failed.why) == ("b", "it has left before its end")


@pytest.mark.parametrize("again", [False, True])
def test_a_coordinator_that_is_started_again_knows_who_left_before_its_end(again: bool) -> None:
    table, (a, b, c) = strict()
    b.do(b.machine.say(m.Leaving()))
    b.say(m.Bye())
    table.journal = e.needed(e.replay(table.journal))  # as if the file had been written anew
    for _ in range(2 if again else 1):
        table.restart(journal=True)
        for seat in (a, c):
            seat.connect()
    assert told(a) is None
    live(table, DEAD_AFTER_S + 2.0)
    failed = told(a)
    assert failed is not None and (failed.replica, failed.why) == ("b", "it has left before its end")


def test_a_coordinator_that_is_started_again_after_all_have_left_begins_anew() -> None:
    table, seats = strict()
    for seat in seats:
        seat.do(seat.machine.say(m.Leaving()))
    for seat in seats:
        seat.say(m.Bye())
    assert e.replay(table.journal).left_early is None
    table.restart(journal=True)
    for name in "abc":
        Seat(table, name).connect()
    live(table, 60.0)
    assert table.events("job_failed") == []


def test_all_were_stopped_if_one_resumes_a_checkpoint() -> None:
    """The coordinator, too, before all had said goodbye to it."""
    table, (a, b, c) = strict()
    b.do(b.machine.say(m.Leaving()))
    b.say(m.Bye())
    table.restart(journal=True)
    for seat in (a, c):
        seat.machine.resumed = True
        seat.connect()
    assert e.replay(table.journal).left_early is None
    live(table, 60.0)
    assert table.events("job_failed") == []


def test_when_a_signal_ends_all_of_them_the_job_has_not_failed() -> None:
    table, seats = strict()
    for seat in seats:
        seat.do(seat.machine.say(m.Leaving()))
    seats[0].say(m.Bye())
    live(table, 60.0)
    for seat in seats[1:]:
        seat.say(m.Bye())
    live(table, 60.0)
    assert table.events("job_failed") == []


def test_a_goodbye_that_the_coordinator_did_not_live_to_hear_is_said_again() -> None:
    table, (a, b, _) = strict()
    b.do(b.machine.say(m.Finished()))
    table.restart(journal=True)
    b.do(b.machine.say(m.Bye()))
    assert not b.machine.over
    for seat in (a, b):
        seat.open()
    live(table, DEAD_AFTER_S + 1.0)
    b.take()
    assert b.machine.over


def test_a_restarted_coordinator_knows_who_has_finished() -> None:
    table, (a, b, c) = strict()
    b.do(b.machine.say(m.Finished()))
    table.restart(journal=True)
    for seat in (a, c):
        seat.connect()
    live(table, 2 * RECOVERY_S)
    assert told(a) is None


@pytest.mark.parametrize("journal", [True, False])
def test_who_does_not_come_back_to_a_restarted_coordinator_is_a_loss(journal: bool) -> None:
    table, (a, _b, c) = strict()
    table.restart(journal=journal)
    for seat in (a, c):
        seat.connect()
    live(table, RECOVERY_S - 1.0)
    assert told(a) is None
    live(table, 2.0)
    failed = told(a)
    assert failed is not None and (failed.replica, failed.versions) == ("b", (1,))


def test_who_comes_back_to_a_restarted_coordinator_in_time_is_none() -> None:
    table, (a, b, c) = strict()
    table.restart(journal=True)
    for seat in (a, c):
        seat.connect()
    live(table, RECOVERY_S - 1.0)
    b.connect()
    live(table, 2 * RECOVERY_S)
    assert table.events("job_failed") == []


def test_a_failed_job_is_not_revived_by_a_restart_nor_by_latecomers() -> None:
    table, (a, b, _) = strict()
    b.cut()
    live(table, DEAD_AFTER_S + 1.0)
    first = told(a)
    table.restart(journal=True)
    for seat in (b, Seat(table, "late")):
        seat.connect()
        assert told(seat) == first
        assert seat.conn is None
    assert e.replay(e.needed(e.replay(table.journal))).failed == first


def test_the_loss_of_all_at_once_is_decided_when_one_of_them_comes() -> None:
    table, seats = strict()
    for seat in seats:
        seat.cut()
    live(table, 60.0)
    assert table.events("job_failed") == []
    for seat in seats[:2]:
        seat.connect()
    live(table, DEAD_AFTER_S + 1.0)
    failed = told(seats[0])
    assert failed is not None and failed.replica == "c"


def test_before_the_job_has_begun_nobody_is_lost() -> None:
    table = Table(on_loss="fail", start_replicas=3)
    a, b, c, d = (Seat(table, name) for name in "abcd")
    a.open()
    b.open()
    b.cut()
    live(table, 5.0)
    for seat in (c, d):
        seat.open()
    live(table, 60.0)
    assert table.events("job_failed") == [] and a.machine.welcomed


def test_where_the_others_train_on_nothing_is_told_of_it() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.do(a.machine.say(m.Leaving()))
    b.cut()
    live(table, 700.0)
    assert table.events("job_failed") == []


def test_replay_is_refused_beside_it() -> None:
    with pytest.raises(UserError, match=r"on_loss=fail with recover=replay; a lost replica ends the job"):
        FaultPolicy(on_loss="fail", recover="replay")
    with pytest.raises(UserError, match=r"policy.on_loss='stop'; allowed: go_on, fail"):
        FaultPolicy(on_loss="stop")
