"""What a member says that no honest one does is refused, and costs the others neither their job nor their memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table

FALSE = 1 << 40


def say_hello(table: Table, **changes: Any) -> Seat:
    """A process whose first message is a hello like that."""
    seat = Seat(table, "x")
    hello = replace(seat.machine.hello(), **changes)
    seat.machine.hello = lambda: hello  # type: ignore[method-assign]
    seat.open()
    seat.take()
    return seat


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"gone": (("a", FALSE),)},
        {"roster": (("a", FALSE),)},
        {"horizon": m.Horizon(1, FALSE)},
        {"incarnation": FALSE},
    ],
)
def test_one_hello_does_not_use_up_the_incarnations_of_a_job(changes: dict[str, Any], running: bool) -> None:
    """The next one would be beyond what a message may hold, for ever: the journal has it, too."""
    table = Table(start_replicas=2)
    seats = [Seat(table, name) for name in "ab"]
    for seat in seats if running else seats[:1]:
        seat.open()
    false = say_hello(table, **changes)
    assert "far beyond any of this job" in false.pop(r.GiveUp).reason
    if not running:
        seats[1].open()
    for seat in seats:
        seat.take()
        assert seat.machine.incarnation == 1
    assert table.coordinator.roster.next_incarnation("c") == 1


def test_lives_that_many_restarts_have_brought_are_taken() -> None:
    table = Table()
    table.start("a", "b")
    say_hello(table, roster=(("c", limits.FAR_LIVES),))
    assert "c" in table.coordinator.roster.members


@pytest.mark.parametrize("running", [False, True])
def test_a_replica_with_other_fragments_is_refused_before_anything_else(running: bool) -> None:
    table = Table(start_replicas=2)
    for name in "ab" if running else "a":
        Seat(table, name).open()
    false = say_hello(table, fragments=3)
    assert "x has 3 fragments, and the job 1; use the same settings" in false.pop(r.GiveUp).reason


@pytest.mark.parametrize(
    "changes",
    [{"lines": {"names": ""}}, {"lines": {}}, {"standby": True, "settings": {"dead_after_s": "x"}}],
)
@pytest.mark.parametrize("running", [False, True])
def test_a_hello_without_sense_is_refused(changes: dict[str, Any], running: bool) -> None:
    """And raises nothing, which would halt the job."""
    table = Table(start_replicas=2)
    for name in "ab" if running else "a":
        Seat(table, name).open()
    assert say_hello(table, **changes).pop(r.GiveUp).reason


def test_what_members_say_in_their_words_is_one_line_that_can_be_printed() -> None:
    said = m.Failed(0, 1, "bad\x1b[2J\nr0: all is well", "")
    assert m.from_replica(m.encode(said)) == replace(said, reason="bad?[2J r0: all is well")
    hold = m.Hold("wait\r\n\x07")
    assert m.decode(m.encode(hold)) == m.Hold("wait  ?")
    with pytest.raises(m.MessageError, match="replica"):
        m.from_replica(m.encode(m.StopJob("enough", "r0\x1b[31m")))
    with pytest.raises(m.MessageError, match="state: it holds characters that cannot be printed"):
        m.from_replica(m.encode(m.Heartbeat("train\x1bing", 1, 0.1)))


def test_a_contribution_of_more_steps_than_a_year_has_is_refused() -> None:
    """The job's inner step would be beyond what a hello may hold."""
    steps = limits.MAX_ADVANCE + 1
    with pytest.raises(m.MessageError, match="steps"):
        m.from_replica(m.encode(m.Propose(m.Contribution(0, 1, steps, steps, 1.0))))


def test_invented_gone_incarnations_do_not_add_up() -> None:
    """Nobody makes a version meanwhile, which would drop their COUNT entries."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    for number in range(4):
        invented = tuple((f"x{number}-{index}", 1) for index in range(limits.MAX_GONE))
        say_hello(table, gone=invented).die()
    roster, (rounds,) = table.coordinator.roster, table.coordinator.rounds
    assert len(roster.gone) <= limits.MAX_GONE // 2 and len(rounds.decide.undropped) <= limits.MAX_GONE // 2
    for seat in (a, b):
        seat.take()
        seat.propose(5)
    for seat in (a, b):
        seat.reduce()
    assert table.version == 1
    assert len(a.machine.hello().gone) <= limits.MAX_GONE
