"""Live states that should be equal and are not: the attempt commits, and those apart fetch what the others have."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table


def propose(*seats: Seat) -> None:
    for seat in seats:
        seat.propose(5)


def test_the_minority_gets_no_commit_but_fetches_what_the_others_have() -> None:
    table = Table()
    a, b, c = table.start("a", "b", "c")
    propose(a, b, c)
    a.reduce(live="x")
    b.reduce(live="y", peak=9.0)
    c.reduce(live="x")
    assert table.version == 1
    assert not table.events("mismatch") and not table.events("abort")
    (told,) = table.events("diverged")
    assert (told.replica, told.data["peak"], told.data["fetches"]) == ("b", 9.0, True)
    assert "a, c" in told.data["reason"] and "one word" not in told.data["reason"]
    a.take()
    c.take()
    assert not b.got(m.Commit)
    assert [x.text for x in b.got(m.Hold)] == [told.data["reason"]] and not a.got(m.Hold)
    b.fetch(a)
    assert b.record == a.record == c.record
    assert b.machine.counted_step(b.record) == 5, "its contribution is in it"
    assert not b.machine.fragments[0].outstanding
    for seat in (a, b, c):
        seat.propose(10)
    for seat in (a, b, c):
        seat.reduce(live="x")
    assert table.version == 2
    assert len(table.events("diverged")) == 1


def test_a_member_whose_model_was_not_looked_at_is_not_compared() -> None:
    table = Table()
    a, b, c = table.start("a", "b", "c")
    propose(a, b, c)
    a.reduce(live="x")
    b.reduce()
    c.reduce(live="x")
    assert table.version == 1 and not table.events("diverged")


@pytest.mark.parametrize(("peaks", "fetches"), [((9.0, 1.0), "a"), ((1.0, 9.0), "b"), ((1.0, 1.0), "b")])
def test_of_two_the_one_with_the_larger_numbers_fetches_or_the_second(peaks: tuple[float, float], fetches: str) -> None:
    table = Table()
    a, b = table.start("a", "b")
    propose(a, b)
    a.reduce(live="x", peak=peaks[0])
    b.reduce(live="y", peak=peaks[1])
    assert [e.replica for e in table.events("diverged")] == [fetches]
    assert "one word against the other" in table.events("diverged")[0].data["reason"]
    behind, ahead = (a, b) if fetches == "a" else (b, a)
    ahead.take()
    behind.fetch(ahead)
    assert a.record == b.record
    assert table.version == 1


def test_two_results_without_a_majority_are_decided_by_the_smaller_peak_too() -> None:
    table = Table()
    a, b = table.start("a", "b")
    propose(a, b)
    for _ in range(2):
        a.reduce("wrong", peak=1e30)
        b.reduce("right", peak=1.0)
    assert table.version == 1
    b.take()
    a.fetch(b)
    assert a.record == b.record


def test_most_members_count_before_the_peak_where_no_digest_has_more_than_half() -> None:
    table = Table()
    seats = table.start("a", "b", "c", "d")
    propose(*seats)
    for seat, live in zip(seats, "xyyz", strict=True):
        seat.reduce(live=live, peak=9.0 if live == "y" else 1.0)
    assert sorted(e.replica for e in table.events("diverged")) == ["a", "d"]


def test_what_is_kept_is_what_a_connected_member_holds() -> None:
    """The majority was lost when it had prepared: it fetches when it is back, from the one that is left."""
    table = Table()
    a, b, c = table.start("a", "b", "c")
    propose(a, b, c)
    a.reduce(live="x")
    a.cut()
    b.reduce(live="x")
    b.cut()
    c.reduce(live="y")
    c.take()
    assert table.version == 1
    assert c.record.version == 1
    for seat in (a, b):
        seat.open()
        assert not seat.got(m.Commit), "it has prepared this very attempt"
        seat.fetch(c)
    assert a.record == b.record == c.record


def test_one_that_was_away_at_the_decision_fetches_when_it_is_back() -> None:
    table = Table()
    a, b, c = table.start("a", "b", "c")
    propose(a, b, c)
    b.reduce(live="y")
    b.cut()
    a.reduce(live="x")
    c.reduce(live="x")
    a.take()
    assert [e.replica for e in table.events("diverged")] == ["b"]
    b.open()
    assert not b.got(m.Commit)
    b.fetch(a)
    assert b.record == a.record


def test_when_those_that_are_kept_die_before_anybody_has_fetched_the_job_goes_on_with_what_is_left() -> None:
    table = Table()
    a, b = table.start("a", "b")
    propose(a, b)
    a.reduce(live="x", peak=1.0)
    b.reduce(live="y", peak=2.0)
    b.take()
    a.cut()
    fetch = b.pop_fetch(0)
    assert fetch.sources == ("a",)
    b.do(b.machine.fetch_failed(0))
    table.tick(table.settings["evict_after_s"] + 1)  # type: ignore[operator]
    b.take()
    b.connect()
    assert b.record.version == 0
    b.propose(6)
    table.tick(1)
    b.take()
    assert any(isinstance(x, r.StartReduce) for x in b.asked) or table.version == 1


def test_machines_that_round_otherwise_are_made_equal_and_none_is_at_fault() -> None:
    table = Table()
    a, b, c = table.start("a", "b", "c", kinds={"a": "avx2", "b": "neon", "c": "avx2"})
    (told,) = table.events("unlike")
    assert (told.replica, told.data["others"]) == ("b", ["a"])
    propose(a, b, c)
    for seat, live in ((a, "x"), (b, "y"), (c, "x")):
        seat.reduce(live=live)
    assert not table.events("diverged")
    (made,) = table.events("equalized")
    assert made.data == {"of": ["b"], "to": ["a", "c"]}
    a.take()
    b.fetch(a)
    assert b.record == a.record


def test_among_machines_of_one_kind_the_one_at_fault_is_named_whatever_the_other_kinds_hold() -> None:
    table = Table()
    names = ("a", "b", "c", "d", "e")
    seats = table.start(*names, kinds={name: "neon" if name < "d" else "avx2" for name in names})
    propose(*seats)
    for seat, live in zip(seats, "xqxyy", strict=True):
        seat.reduce(live=live)
    assert [e.replica for e in table.events("diverged")] == ["b"]
    (made,) = table.events("equalized")
    assert made.data == {"of": ["d", "e"], "to": ["a", "c"]}


def test_that_a_machine_rounds_otherwise_is_said_once_an_incarnation() -> None:
    table = Table()
    a, b = table.start("a", "b", kinds={"a": "avx2", "b": "neon"})
    b.cut()
    b.connect()
    assert [e.replica for e in table.events("unlike")] == ["b"]
    b.die()
    again = Seat(table, "b", arithmetic="neon")
    again.connect()
    assert [e.replica for e in table.events("unlike")] == ["b", "b"]
    assert a.machine.welcomed
