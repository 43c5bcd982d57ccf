"""Adaptive grace: stragglers are waited for as long as training hides it, and no longer."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.rounds.pace import SMOOTHING, Pace
from tests.sync.protocol.table import Seat, Table


def _offer(overlap_s: float, grace: float = 1.0) -> m.Contribution:
    return m.Contribution(0, 0, 5, 5, 5.0, overlap_s=overlap_s, grace=grace)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([_offer(1.0)], 0.7),  # 1.0 - quorum 0.1 - sync 0.2
        ([_offer(1.0, grace=0.5)], 0.35),
        ([_offer(1.0), _offer(0.5)], 0.2),  # the shortest
        ([_offer(0.2)], 0.0),
        ([_offer(60.0)], 2.0),  # the cap
        ([_offer(1.0, grace=0.0)], 2.0),  # not adapted
        ([_offer(0.0)], 2.0),  # no overlap
        ([], 2.0),
    ],
)
def test_the_grace_is_what_training_hides_without_what_the_round_needs(
    offers: list[m.Contribution], expected: float
) -> None:
    pace = Pace()
    pace.learn(0.1, 0.2)
    assert pace.grace_s(offers, 2.0) == pytest.approx(expected)


def test_the_round_is_known_by_moving_averages() -> None:
    pace = Pace()
    assert pace.grace_s([_offer(1.0)], 2.0) == 1.0, "nothing is known at first"
    pace.learn(0.2, 0.4)
    assert (pace.quorum_s, pace.sync_s) == (0.2, 0.4), "the first round is all there is"
    pace.learn(0.0, 1.4)
    assert pace.quorum_s == pytest.approx(0.2 * SMOOTHING)
    assert pace.sync_s == pytest.approx(0.4 * SMOOTHING + 1.4 * (1 - SMOOTHING))


def _table(min_replicas: int = 1) -> tuple[Table, Seat, Seat, Seat]:
    table = Table(start_replicas=3, min_replicas=min_replicas)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.say(m.Heartbeat("training", 0, 0.1))
    return table, a, b, c


def _propose(seat: Seat, last_step: int, *, overlap_s: float, grace: float = 1.0) -> None:
    record = seat.held(0)
    steps = last_step - seat.machine.counted_step(record)
    offer = m.Contribution(0, record.version, steps, last_step, float(steps), overlap_s=overlap_s, grace=grace)
    seat.do(seat.machine.propose(offer))


def test_those_at_work_are_called_in_when_the_hidden_time_is_over() -> None:
    table, a, b, c = _table()
    _propose(a, 5, overlap_s=0.6)
    assert table.coordinator.deadline_s() == pytest.approx(table.now + 0.6)
    table.tick(0.55)
    assert not b.got(m.CallIn)
    table.tick(0.1)
    assert b.got(m.CallIn) and c.got(m.CallIn)


def test_without_an_adaptive_grace_they_have_the_jobs() -> None:
    table, a, b, _ = _table()
    _propose(a, 5, overlap_s=0.6, grace=0.0)
    table.tick(1.9)
    assert not b.got(m.CallIn)
    table.tick(0.2)
    assert b.got(m.CallIn)


def test_it_counts_from_the_quorum_on_but_the_jobs_grace_from_the_first() -> None:
    table, a, b, c = _table(min_replicas=2)
    _propose(a, 5, overlap_s=0.6)
    table.tick(1.0)
    assert not c.got(m.CallIn), "one is no quorum of two"
    _propose(b, 5, overlap_s=0.6)
    table.tick(0.5)
    assert not c.got(m.CallIn)
    table.tick(0.2)
    assert c.got(m.CallIn)
    table, a, b, c = _table(min_replicas=2)
    _propose(a, 5, overlap_s=0.6)
    table.tick(2.1)
    assert b.got(m.CallIn) and c.got(m.CallIn), "nobody waits longer than the job's grace"


def test_what_a_round_takes_shortens_the_next_grace() -> None:
    table, a, b, c = _table()
    for seat in (a, b, c):
        _propose(seat, 5, overlap_s=1.0)
    table.tick(0.7)
    for seat in (a, b, c):
        seat.reduce()
    for seat in (a, b, c):
        seat.take()
    assert table.version == 1
    _propose(a, 10, overlap_s=1.0)
    assert table.coordinator.deadline_s() == pytest.approx(table.now + 0.3)


def test_the_event_of_a_quorum_says_how_long_each_has_waited_and_for_whom_last() -> None:
    table = Table(start_replicas=4, grace_s=60.0)
    a, b, c, d = table.start("a", "b", "c", "d")
    c.propose(5)
    table.tick(1.0)
    a.propose(5)
    b.propose(5)
    table.tick(2.0)
    d.propose(5)
    for seat in (a, b, c, d):
        seat.reduce()
    for seat in (a, b, c, d):
        seat.take()
    a.propose(10)
    b.propose(10)
    table.tick(2.0)
    c.propose(10)
    table.tick(1.0)
    d.die()  # the others go on without it
    first, second = (x.data for x in table.events("quorum"))
    assert (first["for"], [round(x, 1) for x in first["waited"]]) == ("d", [2.0, 2.0, 3.0, 0.0])
    assert (second["for"], [round(x, 1) for x in second["waited"]]) == ("d", [3.0, 3.0, 1.0])


def test_one_that_is_called_in_does_not_wait() -> None:
    table = Table(start_replicas=2, grace_s=1.0)
    a, b = table.start("a", "b")
    b.say(m.Heartbeat("training", 1, 5.0))
    a.propose(5)
    table.wait(1.5)
    assert b.got(m.CallIn)
    b.propose(3)
    (quorum,) = table.events("quorum")
    assert (quorum.data["for"], quorum.data["waited"][1]) == ("b", None)
