"""A member's reducer that hangs while its heartbeats go on: the others wait for it for a while, and once."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table

PATIENCE_S = 2.0 + 3.0
"""grace_s and dead_after_s of the table."""


def hang(seat: Seat) -> r.StartReduce:
    """Its reducer takes the attempt up, and is not heard of again."""
    seat.hangs = True
    seat.take()
    return seat.pop(r.StartReduce)


def hung() -> tuple[Table, Seat, Seat, Seat, r.StartReduce]:
    """A and B have prepared version 1 with C, whose reducer hangs, and have committed it without C."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    stuck = hang(c)
    offered = [seat.machine.fragments[0].contribution for seat in (a, b, c)]
    a.reduce()
    b.reduce()
    table.tick(PATIENCE_S - 1.0)
    assert not table.events("abort")
    table.tick(1.0)
    assert "c: no result" in table.events("abort")[0].data["reason"]
    starts = [a.reduce(), b.reduce()]  # at once, without C
    assert [x.quorum.size for x in starts] == [2, 2]
    assert [x.contribution for x in starts] == offered[:2]  # FREEZE
    a.take()
    b.take()
    assert a.record.version == 1
    assert a.record.counted == (("a", 1, 5), ("b", 1, 5))  # COUNT
    assert c.machine.fragments[0].contribution == offered[2]
    return table, a, b, c, stuck


def test_who_has_prepared_waits_for_a_reducer_that_hangs_and_goes_on_without_it() -> None:
    table, a, b, c, _ = hung()
    for step in (10, 15):  # the next rounds wait for nobody
        c.fetch(a)
        assert c.machine.counted_step(c.record) == 0  # its steps are pending
        for seat in (a, b, c):
            seat.propose(step)
        assert not c.got(m.Quorum)
        a.reduce()
        b.reduce()
        a.take()
        b.take()
    assert table.version == 3
    assert len(table.events("abort")) == 1


def test_it_takes_part_again_with_all_its_steps_once_its_reducer_is_free() -> None:
    table, a, b, c, stuck = hung()
    c.fetch(a)
    c.hangs = False
    c.do(c.machine.reduced(0, stuck.quorum.attempt, "late", [[5]] * 3))  # it comes to an end: of what is long over
    assert table.version == 1
    for seat in (a, b, c):
        seat.propose(10)
    for seat in (a, b, c):
        seat.reduce()
    a.take()
    assert a.record.counted == (("a", 1, 10), ("b", 1, 10), ("c", 1, 10))


def test_who_only_comes_late_is_given_twice_as_long_the_next_time() -> None:
    table, a, b, c, stuck = hung()
    c.fetch(a)
    c.hangs = False
    c.do(c.machine.reduced(0, stuck.quorum.attempt, "late", [[5]] * 3))
    for seat in (a, b, c):
        seat.propose(10)
    a.reduce()
    b.reduce()
    table.tick(2 * PATIENCE_S - 1.0)
    c.reduce()
    assert table.version == 2
    assert len(table.events("abort")) == 1


def test_a_reducer_that_hangs_does_so_once_for_all_fragments_that_are_under_way() -> None:
    table = Table(start_replicas=2, fragments=3)
    a, b = table.start("a", "b")
    for fragment in range(3):
        a.propose(5, fragment)
        b.propose(5, fragment)
    b.hangs = True
    b.take()
    a.take()
    for _ in range(3):
        a.reduce()
    table.tick(PATIENCE_S)
    assert len(table.events("abort")) == 3
    for _ in range(3):
        a.reduce()
    a.take()
    assert [a.held(fragment).version for fragment in range(3)] == [1, 1, 1]
    assert table.coordinator.roster.members["b"].late == 1


def test_a_result_that_takes_long_for_all_is_waited_for_as_long_again() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    table.tick(40.0)
    a.reduce()
    table.tick(40.0 + PATIENCE_S - 1.0)
    b.reduce()
    assert table.version == 1
    assert not table.events("abort")


def test_a_reducer_that_hangs_before_anybody_could_reduce_fails_two_attempts_and_no_more() -> None:
    """The others time out and can name nobody, since its host answers."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    for _ in range(2):
        hang(c)
        a.take()
        b.take()
        table.tick(3.0)
        a.do(a.machine.reduce_failed(0, a.pop(r.StartReduce).quorum.attempt, reason="no piece for 3 s"))
        b.take()
        table.tick(1.0)
    a.reduce()
    b.reduce()
    a.take()
    assert a.record.counted == (("a", 1, 5), ("b", 1, 5))


def test_members_that_stop_at_an_abort_are_free_for_the_next_attempt() -> None:
    """However long that takes to come: they have said so."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.take()
    b.take()
    table.tick(16.0)
    a.do(a.machine.reduce_failed(0, a.pop(r.StartReduce).quorum.attempt, reason="cable"))
    b.take()
    table.tick(2.0)
    assert a.reduce().quorum.size == 2
    b.reduce()
    assert table.version == 1


def test_a_lone_member_whose_reducer_hangs_blocks_nobody_who_comes_after_it() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    a.propose(5)
    table.tick(3.0)  # B is busy with something else
    assert hang(a).quorum.size == 1
    table.tick(60.0)
    assert not table.events("abort")  # nobody else has anything to offer
    b.propose(9)
    table.tick(1.0)
    start = b.reduce()
    assert start.quorum.size == 1
    b.take()
    assert b.record.counted == (("b", 1, 9),)
    a.fetch(b)
    assert a.machine.counted_step(a.record) == 0


def test_members_of_which_all_hang_train_on_and_block_nobody_who_comes_after_them() -> None:
    table = Table(start_replicas=3, evict_after_s=20.0)
    a, b, c = table.start("a", "b", "c")
    a.propose(5)
    b.propose(5)
    table.tick(3.0)
    for seat in (a, b):
        assert hang(seat).quorum.size == 2
    c.propose(9)
    table.tick(20.0)
    assert len(table.events("abort")) == 1
    assert c.reduce().quorum.size == 1
    c.take()
    assert c.record.counted == (("c", 1, 9),)
    for seat in (a, b):
        seat.fetch(c)
        seat.propose(12)
    table.tick(3.0)
    assert a.got(m.TrainOn) and b.got(m.TrainOn)
    assert len(table.events("quorum")) == 2
    c.propose(20)
    assert c.reduce().quorum.size == 1
    assert table.version == 2


def test_who_comes_after_members_of_which_all_hang_trains_on_until_they_are_given_up() -> None:
    table = Table(start_replicas=3, evict_after_s=60.0)
    a, b, c = table.start("a", "b", "c")
    a.propose(5)
    b.propose(5)
    table.tick(3.0)
    for seat in (a, b):
        hang(seat)
    c.propose(9)
    table.tick(PATIENCE_S - 1.0)
    assert not c.got(m.TrainOn)
    table.tick(1.0)
    assert c.got(m.TrainOn)
    assert not table.events("abort")
    c.take()
    assert c.machine.fragments[0].outstanding, "FREEZE"
    table.tick(60.0)
    assert c.reduce().quorum.size == 1


def test_who_reconnects_before_its_loss_was_noticed_is_not_taken_for_one_whose_reducer_hangs() -> None:
    """It has never heard of the attempt, and will say nothing of it: it would be left out for ever."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    assert b.conn is not None
    del table.seats_by_conn[b.conn]
    b.do(b.machine.disconnect())
    b.open()
    assert [x.data["reason"] for x in table.events("abort")] == ["b was lost before it had prepared"]
    assert table.coordinator.roster.members["b"].busy_since_s is None
    a.reduce()
    b.reduce()
    assert table.version == 1


def rounds_with_a_fake(state: str, *, moves: bool, step_s: float, count: int) -> list[float]:
    """How long each of the others' rounds waits where a member answers and never proposes."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    fake = Seat(table, "fake")
    fake.open()
    fake.take()
    waits, beat_s, step = [], 0.0, 5
    for number in range(count):
        for seat in (a, b):
            seat.take()
            seat.propose(5 * (number + 1))
        start_s = table.now
        while not a.got(m.Quorum):
            table.wait(0.1)
            if table.now >= beat_s:
                beat_s, step = table.now + 1.0, step + moves
                a.say(m.Heartbeat("waiting", 1, 0.1))
                b.say(m.Heartbeat("waiting", 1, 0.1))
                fake.say(m.Heartbeat(state, step, step_s))
        waits.append(table.now - start_s)
        for seat in (a, b):
            seat.reduce()
        for seat in (a, b):
            seat.take()
        fake.say(m.Holds(a.record.position))
        table.wait(1.0)
        fake.say(m.Heartbeat(state, step, step_s))
    return waits


@pytest.mark.parametrize("state", ["training", "waiting", "fetching", "out_of_units", "a word"])
@pytest.mark.parametrize("moves", [False, True])
def test_who_answers_and_never_proposes_is_waited_for_less_and_less(state: str, moves: bool) -> None:
    waits = rounds_with_a_fake(state, moves=moves, step_s=5.0, count=40)
    long = [number for number, seconds in enumerate(waits) if seconds > 0.3]
    assert long[:3] == [0, 1, 2], "a newcomer may need a while for its first step"
    assert len(long) <= 7 and waits[-8:] == [0.0] * 8, waits


def test_who_proposes_again_is_waited_for_as_before() -> None:
    table = Table(start_replicas=3)
    _, _, c = table.start("a", "b", "c")
    member = table.coordinator.roster.members["c"]
    for _ in range(5):
        member.miss(table.now, 3.0, at_work=True)
    assert member.stalled
    c.propose(5)
    assert not member.stalled
    assert not member.miss(table.now, 3.0, at_work=False), "the first one of a row"
