"""What triggers ask of the protocol: to be heard at once, and the means of a few numbers."""

from __future__ import annotations

import json

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.limits import MAX_READING
from tests.sync.protocol.table import Seat, Table


def _calls(*seats: Seat) -> list[bool]:
    """Who is called in; messages are taken in."""
    for seat in seats:
        seat.take()
    return [seat.machine.fragments[0].called_in for seat in seats]


def _read(seat: Seat, *values: float, version: int | None = None, fragment: int = 0) -> None:
    """A heartbeat with numbers."""
    version = seat.held(fragment).version if version is None else version
    seat.say(m.Heartbeat("training", 1, 0.1, (m.Reading(fragment, version, values),)))


def _meet(*seats: Seat, step: int) -> None:
    for seat in seats:
        seat.propose(step)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


# ---------------------------------------------------------------- now


def test_a_trigger_that_means_now_calls_everyone_in_at_once() -> None:
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    a.propose(3, now=True)
    assert _calls(b, c) == [True, True]
    assert len(table.events("hurry")) == 1
    b.propose(2)
    assert not table.events("quorum")
    c.propose(4)
    assert [x.reduce().quorum.size for x in (a, b, c)] == [3, 3, 3]
    for seat in (a, b, c):
        seat.take()
    assert {seat.record.counted for seat in (a, b, c)} == {(("a", 1, 3), ("b", 1, 2), ("c", 1, 4))}
    a.propose(6)
    assert _calls(b, c) == [False, False], "the next round is a new one"


def test_others_are_called_in_after_the_grace_as_ever() -> None:
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    a.propose(3)
    assert _calls(b, c) == [False, False]
    b.propose(3, now=True)
    assert _calls(c) == [True], "also when the second one means now"


def test_who_is_called_in_at_once_has_its_time_as_ever() -> None:
    """A long step is no hang: the quorum waits until the grace has passed, and two steps more."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    a.propose(3, now=True)
    b.propose(3)
    assert _calls(c) == [True]
    table.wait(1.9)
    assert not table.events("quorum") and not table.events("stalled")
    c.propose(3)
    assert table.events("quorum")[0].data["steps"] == [3, 3, 3]


def test_a_hung_one_is_left_out_after_the_grace_and_its_patience() -> None:
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.say(m.Heartbeat("training", 2, 0.1))
    a.propose(3, now=True)
    b.propose(3)
    table.wait(2.0)
    assert not table.events("quorum")
    table.wait(0.6)
    assert [x.replica for x in table.events("stalled")] == ["c"]
    assert [incarnation_id[0] for incarnation_id in table.events("quorum")[0].data["members"]] == ["a", "b"]


def test_a_leaver_hurries_nobody() -> None:
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    a.do(a.machine.say(m.Leaving()))
    a.propose(3, now=True)
    assert _calls(b, c) == [False, False]
    assert not table.events("hurry")


def test_who_comes_back_into_a_hurried_round_is_called_in_too() -> None:
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    _meet(a, b, c, step=5)
    c.cut()
    a.propose(8, now=True)
    c.connect()
    assert _calls(b, c) == [True, True]


def test_a_contribution_that_met_no_coordinator_still_means_now_when_one_is_there() -> None:
    """Offered between the hello and the welcome, it goes out with the welcome."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    _meet(a, b, c, step=5)
    a.cut()
    a.open()
    a.propose(8, now=True)
    a.take()
    assert _calls(b, c) == [True, True]


# ---------------------------------------------------------------- readings


def test_each_reading_is_answered_with_the_means_of_all() -> None:
    table = Table(start_replicas=3)
    seats = table.start("a", "b", "c")
    for seat, value in zip(seats, (1.0, 2.0, 6.0), strict=True):
        _read(seat, value, -value)
    assert [len(seat.got(m.Means)) for seat in seats] == [1, 1, 1], "nobody else is answered"
    table.wait(0.1)
    _read(seats[0], 4.0, -4.0)
    for seat in seats:
        seat.take()
    first, second = (seat.machine.fragments[0].means for seat in seats[:2])
    assert first == m.Means(0, 0, 3, (4.0, -4.0))
    assert second is not None and second != first


def test_without_readings_nobody_is_told_anything() -> None:
    table = Table()
    a, b = table.start("a", "b")
    table.tick(5.0)
    assert not a.inbox and not b.inbox
    assert a.machine.fragments[0].means is None


def test_readings_of_another_version_count_for_nothing_and_means_end_with_theirs() -> None:
    table = Table()
    a, b = table.start("a", "b")
    _read(a, 9.0)
    a.take()
    assert a.machine.fragments[0].means == m.Means(0, 0, 1, (9.0,))
    _meet(a, b, step=5)
    assert a.machine.fragments[0].means is None
    table.wait(0.1)
    _read(a, 9.0, version=0)
    assert not a.got(m.Means)
    _read(b, 2.0)
    _read(a, 4.0)
    table.wait(0.1)
    _read(a, 4.0)
    a.take()
    assert a.machine.fragments[0].means == m.Means(0, 1, 2, (3.0,))


def test_who_is_away_is_not_in_the_means() -> None:
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    for seat, value in ((a, 1.0), (b, 2.0), (c, 6.0)):
        _read(seat, value)
    c.cut()
    _read(a, 1.0)
    a.take()
    assert a.machine.fragments[0].means == m.Means(0, 0, 2, (1.5,))


def test_means_have_as_many_numbers_as_everybody_has_told() -> None:
    table = Table()
    a, b = table.start("a", "b")
    _read(a, 1.0, 5.0)
    _read(b, 3.0)
    table.wait(0.1)
    _read(a, 1.0, 5.0)
    a.take()
    assert a.machine.fragments[0].means == m.Means(0, 0, 2, (2.0,))


def test_fragments_have_their_own() -> None:
    table = Table(fragments=2)
    a, _ = table.start("a", "b")
    a.say(m.Heartbeat("training", 1, 0.1, (m.Reading(0, 0, (1.0,)), m.Reading(1, 0, (2.0,)), m.Reading(7, 0, (3.0,)))))
    a.take()
    assert [a.machine.fragments[f].means for f in (0, 1)] == [m.Means(0, 0, 1, (1.0,)), m.Means(1, 0, 1, (2.0,))]


def test_four_thousand_replicas_ask_for_few_sums() -> None:
    """Means are made anew at most every 0.05 s, however many ask."""
    table = Table()
    a, b = table.start("a", "b")
    _read(a, 1.0)
    _read(b, 9.0)
    b.take()
    assert b.machine.fragments[0].means == m.Means(0, 0, 1, (1.0,))
    table.wait(0.05)
    _read(b, 9.0)
    b.take()
    assert b.machine.fragments[0].means == m.Means(0, 0, 2, (5.0,))


@pytest.mark.parametrize(
    ("readings", "what"),
    [
        ([[0, 0, [MAX_READING * 2]]], "readings.values"),
        ([[0, 0, [1.0] * 9]], "readings.values: 9 entries"),
        ([[0, -1, [1.0]]], "readings.version"),
        ([[5000, 0, [1.0]]], "readings.fragment"),
        ([[1, 0, [1.0]], [1, 0, [1.0]]], "two of fragment 1"),
    ],
)
def test_readings_that_make_no_sense_are_refused(readings: list[list[object]], what: str) -> None:
    fields = [dict(zip(("fragment", "version", "values"), reading, strict=True)) for reading in readings]
    text = json.dumps({"type": "Heartbeat", "state": "training", "inner_step": 1, "step_s": 0.1, "readings": fields})
    with pytest.raises(m.MessageError, match=what):
        m.from_replica(text)
