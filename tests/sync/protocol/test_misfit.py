"""What is said of a replica that does not fit a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.admission import differs, makes_no_sense
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.resumed import Held
from tests.sync.protocol.table import Seat, Table

MODEL = "9 tensors, 1,234 parameters, aaaa"


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (MODEL, MODEL.replace("aaaa", "bbbb"), "shapes or dtypes (their hash is aaaa here, bbbb in the job)"),
        (MODEL, "8 tensors, 1,000 parameters, cccc",
         "another model: 9 tensors, 1,234 parameters here, 8 tensors, 1,000 parameters in the job"),
        (f"{MODEL}; {MODEL}", f"{MODEL}; 8 tensors, 1 parameters, cccc", "another model (fragment 1): 9 tensors"),
        (f"{MODEL}; {MODEL}", MODEL, "model: 2 fragments here, 1 in the job"),
        ("nothing", MODEL, f"model: nothing here, {MODEL} in the job"),
    ],
)  # fmt: skip
def test_of_another_model_it_is_said_what_differs(here: str, there: str, said: str) -> None:
    assert said in differs("model", here, there)


def test_of_a_setting_both_values_are_told() -> None:
    assert differs("policy.min_replicas", "2", "1") == "policy.min_replicas: 2 here, 1 in the job"


def with_two_versions() -> tuple[Table, list[Seat]]:
    """A job that has made a version, whose coordinator is started again with its journal."""
    table = Table()
    seats = table.start("a", "b")
    for seat in seats:
        seat.propose(5)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()
    assert table.version == 1
    table.restart(journal=True)
    return table, seats


def goes_on(table: Table, seats: list[Seat]) -> bool:
    for seat in seats:
        seat.open()
    while table.coordinator.startup is not None:
        table.tick(1.0)
    for seat in seats:
        seat.take()
    return table.version == 1 and all(seat.machine.incarnation == 1 for seat in seats)


def test_members_outrank_a_newcomer_of_other_settings_that_comes_first_after_a_restart() -> None:
    table, seats = with_two_versions()
    other = Seat(table, "other", model="another")
    other.open()
    assert goes_on(table, seats)
    assert "other" not in table.coordinator.roster.members
    other.open()
    other.take()
    assert "does not fit job" in other.pop(r.GiveUp).reason


def test_members_do_not_outrank_members() -> None:
    table, (a, b) = with_two_versions()
    a.open()
    b.machine.identity = replace(b.machine.identity, lines={"model": "another"})
    b.open()
    b.take()
    assert b.conn is None and "does not fit job" in b.pop(r.Notice).text
    while table.coordinator.startup is not None:
        table.tick(1.0)
    a.take()
    assert (table.version, a.machine.incarnation) == (1, 1)


def test_one_that_was_given_up_while_it_was_away_trains_on_when_a_coordinator_of_another_version_refuses_it() -> None:
    table, (a, _) = with_two_versions()
    assert goes_on(table, [a])
    table.do(table.coordinator.members.gone(("a", 1), "test"))
    a.take()
    assert a.pop(r.Reset) and a.machine.incarnation == 0
    assert a.machine.receive(m.Refuse("misfit", "another version")) == [r.Notice("another version")]


def test_a_newcomer_that_is_gone_again_keeps_no_member_out() -> None:
    table, (a, b) = with_two_versions()
    other = Seat(table, "other", model="another")
    other.open()
    other.die()
    table.tick(1.0)
    assert goes_on(table, [a, b])


def test_a_hello_is_what_it_is_compared_by() -> None:
    settings = {"min_replicas": 1, "dead_after_s": 1e18}
    lines = {"model": "m", "policy.min_replicas": "1", "policy.dead_after_s": "10.0"}
    hello = m.Hello(m.PROTOCOL, "j", "a", 0, 0, 1, 0, "a", "init", 1, lines, settings, (), (), (), (), (), 0)
    assert makes_no_sense("j", hello) == (
        "the hello of replica 'a' makes no sense: it is compared by policy.dead_after_s=10.0, and has 1e+18"
    )
    assert not makes_no_sense("j", replace(hello, settings=settings | {"dead_after_s": 10.0}))


def test_a_member_whose_settings_are_refused_outranks_nobody() -> None:
    table, (a, b) = with_two_versions()
    a.machine.identity = replace(a.machine.identity, settings=table.settings | {"dead_after_s": -1.0})
    a.open()
    a.take()
    assert "must be a number of seconds" in a.pop(r.Notice).text
    assert goes_on(table, [b])


def test_members_do_not_outrank_replicas_that_resume_a_checkpoint() -> None:
    """All were started again with other settings: an old process that was left over ends none of them."""
    table, (a, _) = with_two_versions()
    resumed = [Seat(table, name, model="another", address=f"new {name}") for name in ("a", "b")]
    for seat in resumed:
        seat.machine.resume(Held(seat.name, 1, 1, roster={"a": 1, "b": 1}, records=(a.record,)))
        seat.open()
    a.open()
    a.take()
    assert "does not fit job" in a.pop(r.Notice).text
    for seat in resumed:
        seat.take()
        assert seat.conn is not None


def test_a_start_does_not_wait_for_replicas_that_were_turned_away() -> None:
    table = Table(start_replicas=3, start_s=60.0)
    seats = [Seat(table, name) for name in ("a", "b")]
    for seat in seats:
        seat.connect()
    odd = Seat(table, "odd", model="another")
    odd.connect()
    assert "does not fit job" in odd.pop(r.GiveUp).reason
    for seat in seats:
        seat.take()
    assert table.coordinator.running and all(seat.machine.incarnation == 1 for seat in seats)


def test_a_start_does_not_wait_for_replicas_that_are_not_started_again_unless_they_come() -> None:
    table = Table(start_replicas=3, start_s=60.0)
    table.do(table.coordinator.give_up(table.now, "c"))
    a, c = Seat(table, "a"), Seat(table, "c")
    a.connect()
    startup = table.coordinator.startup
    assert startup is not None and startup.text(table.now).startswith("1 of 3 replicas connected; the job starts in")
    c.connect()  # somebody has started it all the same
    assert not table.coordinator.running
    table.do(table.coordinator.give_up(table.now, "b"))
    assert table.coordinator.running
    Seat(table, "b").connect()
    assert table.coordinator.roster.members["b"].conn is not None


def test_a_start_waits_for_all_others_and_for_one_that_was_turned_away_and_comes_as_it_should() -> None:
    table = Table(start_replicas=3, start_s=60.0)
    first, odd, late = Seat(table, "a"), Seat(table, "b", model="another"), Seat(table, "b")
    for seat in (first, odd, odd):  # turned away twice, it is one all the same
        seat.connect()
    assert not table.coordinator.running
    late.connect()
    assert not table.coordinator.running
    odd.connect()  # another process of its id
    assert not table.coordinator.running
    Seat(table, "c").connect()
    assert table.coordinator.running
