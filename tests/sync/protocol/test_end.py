"""END: a job that has ended is not trained once more by who comes late."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator import effects as e
from ftopt.sync.protocol.coordinator.status import status
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table


def round_of(*seats: Seat, last_step: int) -> None:
    for seat in seats:
        seat.propose(last_step)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


def leave(seat: Seat, *, finished: bool) -> None:
    if finished:
        seat.say(m.Finished())
    seat.do(seat.machine.leave())
    seat.say(m.Bye(early=not finished))


@pytest.mark.parametrize("journal", [None, "kept", "compacted"])
@pytest.mark.parametrize("finished", [True, False])
def test_who_was_killed_before_the_others_ended_does_not_begin_from_the_start(
    finished: bool, journal: str | None
) -> None:
    """It would train all of the job once more, alone. A job whose last replicas were stopped starts again."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    b.cut()
    leave(a, finished=finished)
    for _ in range(2 if journal == "compacted" else 1 if journal else 0):
        table.restart(journal=True)
        table.journal[:] = e.needed(e.replay(table.journal))
    b = b.die()
    b.open()
    if b.conn is None:  # its predecessor is given up: it comes again
        b.open()
    table.tick(100.0)
    b.take()
    if finished:
        assert "the job has ended at version 1, inner step 10" in b.pop(r.GiveUp).reason
    else:
        assert b.record.version == 0
    assert len(table.events("start")) == (1 if finished else 2)


@pytest.mark.parametrize("journal", [False, True])
def test_who_was_still_fetching_when_the_last_holder_ended_does_not_begin_from_the_start(journal: bool) -> None:
    """A replica at its end waits two seconds, and a large state takes longer."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    b.cut()
    b = b.die()
    b.open()
    leave(a, finished=True)
    a.cut()
    b.take()
    b.pop_fetch(0)
    b.do(b.machine.fetch_failed(0))
    if journal:
        table.restart(journal=True)
    b.open()
    table.tick(100.0)
    b.take()
    assert "the job has ended at version 1, inner step 10" in b.pop(r.GiveUp).reason
    assert len(table.events("start")) == 1
    c = Seat(table, "c")
    c.open()  # b is not waited for
    c.take()
    assert "the job has ended" in c.pop(r.GiveUp).reason


@pytest.mark.parametrize("journal", [False, True])
def test_a_newcomer_to_a_job_that_has_ended_does_not_wait_for_one_that_is_dead(journal: bool) -> None:
    """It is refused as if all had left; the dead one's machine may still run, and then goes on."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    c.cut()
    round_of(a, b, last_step=10)
    for seat in (a, b):
        leave(seat, finished=True)
    if journal:
        table.restart(journal=True)
    a = a.die()
    a.open()
    if a.conn is None:
        a.open()
    table.tick(60.0)
    a.take()
    assert "the job has ended" in a.pop(r.GiveUp).reason
    for _ in range(3):
        if c.conn is None:
            c.open()
        table.tick(60.0)
        c.take()
    assert table.coordinator.running and c.record.version == 0


def test_a_job_has_not_ended_while_one_that_came_later_trains() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    leave(a, finished=True)
    c = Seat(table, "c")
    c.open()
    c.fetch(b)
    leave(b, finished=False)
    leave(c, finished=False)
    for journal in (False, True):
        if journal:
            table.restart(journal=True)
        d = Seat(table, "d")
        d.open()
        table.tick(100.0)
        d.take()
        assert d.record.version == 0
        leave(d, finished=False)


def test_a_checkpoint_of_a_job_that_has_ended_is_restored() -> None:
    table = Table(start_replicas=1)
    (a,) = table.start("a")
    round_of(a, last_step=10)
    saved = a.record
    leave(a, finished=True)
    a = Seat(table, "a")
    a.machine.checkpoint = saved.position
    a.open()
    a.take()
    assert a.pop(r.RestoreCheckpoint)


def test_a_job_that_has_ended_does_not_go_back_to_an_older_checkpoint() -> None:
    """One that left early is started once more, as it was, when the others have trained to the end."""
    table = Table(start_replicas=1, start_s=10.0)
    (a,) = table.start("a")
    round_of(a, last_step=10)
    saved = a.record
    round_of(a, last_step=20)
    leave(a, finished=True)
    b = Seat(table, "b")
    b.machine.checkpoint = saved.position
    b.open()
    b.take()
    table.tick(11.0)
    b.take()
    assert not [x for x in b.asked if isinstance(x, r.RestoreCheckpoint)]
    assert "the job has ended at version 2, inner step 20, and the replicas" in b.pop(r.GiveUp).reason


@pytest.mark.parametrize("resumed", [True, False])
def test_a_newcomer_to_a_job_that_has_ended_waits_for_one_that_has_its_checkpoint(resumed: bool) -> None:
    """They are started at the same time; the newcomer, who has nothing to read, is often the first."""
    table = Table(start_replicas=2)
    (a, b) = table.start("a", "b")
    round_of(a, b, last_step=10)
    saved = a.record
    for seat in (a, b):
        leave(seat, finished=True)
    a, b = Seat(table, "a"), Seat(table, "b")
    a.machine.checkpoint = saved.position
    b.open()
    b.take()
    assert b.pop(r.Notice).text == (
        "the job has ended at version 1, inner step 10; waiting 10 s at most for a replica that resumes a checkpoint "
        "of it"
    )
    table.tick(9.0)
    if resumed:
        a.open()
        a.take()
        assert a.pop(r.RestoreCheckpoint)
    table.tick(2.0)
    assert (b.conn is not None) == resumed


def test_of_a_job_that_has_ended_the_status_says_so_before_and_after_one_that_comes_late() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    b.cut()
    table.tick(5.0)
    round_of(a, last_step=20)
    leave(a, finished=True)
    ended = "the job has ended at version 2, inner step 20: no replica is connected"
    table.tick(1.0)
    assert status(table.coordinator, table.now)["phase"] == ended
    late = Seat(table, "c")
    late.open()
    table.tick(30.0)
    assert late.conn is None
    assert status(table.coordinator, table.now)["phase"] == ended
    assert [x.data["connected"] for x in table.events("rollback")] == [0]
