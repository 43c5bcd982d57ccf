"""Gone incarnations are forgotten: a job uses ids without end, and who is gone stays out (HORIZON)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.coordinator.roster.horizon import KEPT, MovingHorizon
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.resumed import Held, another_life, returning
from ftopt.sync.protocol.samples import Samples
from tests.sync.protocol.table import Seat, Table


def forgetful(kept: int = 0) -> Table:
    table = Table()
    table.coordinator = Coordinator("j", now=table.now, kept_gone=kept)
    return table


def commit(seats: list[Seat], step: int) -> None:
    for seat in seats:
        seat.take()
        seat.propose(step)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


def gone(table: Table, replica: str) -> None:
    table.do(table.coordinator.members.gone(table.coordinator.roster.members[replica].incarnation_id, "test"))


def cut_off_and_forgotten() -> tuple[Table, list[Seat], Seat]:
    """C's first step is in version 1, of which it does not hear; it is evicted, and forgotten with version 2."""
    table = forgetful()
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    for seat in (a, b, c):
        seat.reduce()
    c.cut()
    for seat in (a, b):
        seat.take()
    Seat(table, "c", address="elsewhere").open()
    (c2,) = [x for x in table.seats_by_conn.values() if x.name == "c"]
    c2.take()
    c2.die()
    table.tick(700.0)
    commit([a, b], 10)
    assert table.version == 2 and not table.coordinator.roster.gone
    return table, [a, b], c


@pytest.mark.parametrize("memory", ["lives", "journal", "none"])
def test_who_is_forgotten_is_not_let_in_again(memory: str) -> None:
    """Else its first step would be counted a second time: nobody knows any more that it is in the model."""
    table, others, c = cut_off_and_forgotten()
    if memory != "lives":
        table.restart(journal=memory == "journal")
    order = [c, *others] if memory == "none" else [*others, c]
    for seat in order if memory != "lives" else [c]:
        seat.open()
        seat.take()
    table.tick(1.0)
    for seat in order:
        seat.take()
    assert "evicted" in c.pop(r.Reset).reason
    c.open()
    c.take()
    assert c.machine.incarnation > 2
    assert table.coordinator.roster.members["c"].incarnation == c.machine.incarnation
    commit(others, 15)
    assert table.version == 3


def test_who_alone_was_told_of_a_version_and_is_forgotten_is_not_let_in_again() -> None:
    """It holds a version that is as late as the one with which it is forgotten, on a branch that nobody else has."""
    table = forgetful()
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    for seat in (a, b, c):
        seat.reduce()
    c.take()
    for seat in (a, b, c):
        seat.cut()
        seat.machine.disconnect()
    table.restart(journal=False)
    table.coordinator.roster.horizon._kept = 0
    for seat in (a, b):
        seat.open()
    gone(table, "c")
    while table.coordinator.startup is not None:
        table.tick(1.0)
    for seat in (a, b):
        seat.take()
    for seat in (a, b):
        seat.reduce()
    for seat in (a, b):
        seat.take()
    assert (table.version, c.record.version, table.coordinator.roster.gone) == (1, 1, {})
    assert c.record.position != a.record.position
    commit([a, b], 10)
    table.restart(journal=False)
    for seat in (c, a, b):
        seat.open()
    while table.coordinator.startup is not None:
        table.tick(1.0)
    c.take()
    assert "evicted" in c.pop(r.Reset).reason


def test_a_member_that_was_away_does_not_bring_back_who_is_forgotten() -> None:
    table = forgetful()
    a, b, c, d = table.start("a", "b", "c", "d")
    d.cut()
    d.machine.disconnect()
    c.machine.say(m.Bye())
    c.say(m.Bye())
    commit([a, b], 5)
    assert not table.coordinator.roster.gone and dict(table.coordinator.roster.members).keys() == {"a", "b", "d"}
    assert "c" in d.machine.known.roster
    d.open()
    d.take()
    assert "c" not in table.coordinator.roster.members
    assert "c" not in d.machine.known.roster and not d.machine.known.gone


def test_what_is_written_anew_forgets_too() -> None:
    entries: list[e.Journalled] = [
        *(e.Known(f"r{n}", 1) for n in range(4)),
        *(e.Gone(f"r{n}", 1) for n in range(3)),
        e.Forgotten(m.Horizon(2, 1), ("r0", "r1")),
    ]
    state = e.replay(entries)
    assert (state.roster, state.gone, state.horizon) == ((("r3", 1),), (("r2", 1),), m.Horizon(2, 1))
    assert e.replay(e.needed(state)) == state


def test_ids_that_are_used_once_do_not_add_up() -> None:
    """Pods and processes have new ids each time: with 32,768 gone ones in a hello nobody could connect any more."""
    kept = 80
    table = forgetful(kept)
    a, b = table.start("a", "b")
    for number in range(300):
        pod = Seat(table, f"pod-{number}")
        pod.open()
        pod.die()
        gone(table, pod.name)
        if number % 100 == 99:
            commit([a, b], number)
    assert len(table.coordinator.roster.gone) <= kept * 5 // 4 and len(table.coordinator.roster.members) == 2
    a.cut()
    a.open()
    a.take()
    assert len(a.machine.known.gone) <= kept * 5 // 4
    assert len(m.encode(a.machine.hello())) * KEPT / kept < limits.MAX_MESSAGE_BYTES / 40


def test_without_a_commit_they_do_not_add_up_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods that crash before they train make no version."""
    monkeypatch.setattr(limits, "MAX_GONE", 40)
    table = forgetful(kept=4)
    table.start("a", "b")
    for number in range(60):
        pod = Seat(table, f"pod-{number}")
        pod.open()
        gone(table, pod.name)
        table.tick(0.1)
    assert len(table.coordinator.roster.gone) <= 20


def test_a_checkpoint_tells_which_lives_were_given() -> None:
    """Its state may count the steps of one that is forgotten by now, and a later coordinator knows of none."""
    saved = Held("a", 1, 100, forgotten=2)
    assert returning([saved], ["a", "b"], []).incarnation_ids == {"a": 1, "b": 3}
    assert another_life(("a", 1), [saved], []).incarnation == 3
    table = Table(start_replicas=1)
    a = Seat(table, "a")
    a.machine.resume(Held("a", 1, 100, records=(m.Record(0, 5, "chain", 5),), forgotten=2))
    a.open()
    a.take()
    table.tick(40.0)
    b = Seat(table, "b")
    b.open()
    b.take()
    assert (a.machine.incarnation, b.machine.incarnation) == (1, 3)


def restart(table: Table, *, journal: bool = True) -> None:
    table.restart(journal=journal)
    saved = e.replay(table.journal) if journal else None
    table.coordinator = Coordinator(
        "j", saved=saved, now=table.now, life=table.life, reachable_s=table.now, kept_gone=0
    )


def come_and_go(table: Table, replica: str) -> None:
    pod = Seat(table, replica)
    pod.open()
    pod.take()
    pod.die()
    gone(table, replica)


@pytest.mark.parametrize("journal", [False, True])
def test_who_goes_while_the_job_starts_up_is_forgotten_as_a_holder_of_its_version(journal: bool) -> None:
    """C's first steps are in version 1, of which it does not hear; others report, after a restart, that it is gone."""
    table = forgetful()
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    for seat in (a, b, c):
        seat.reduce()
    c.cut()
    a.take()
    b.take()
    gone(table, "c")
    a.take()
    b.take()
    restart(table, journal=journal)
    for seat in (a, b):
        seat.open()
        seat.take()
    for seat in (a, b):
        seat.take()
    commit([a, b], 10)
    assert not table.coordinator.roster.gone
    c.open()
    c.take()
    assert "evicted" in c.pop(r.Reset).reason


@pytest.mark.parametrize("first", ["away", "joined"])
@pytest.mark.parametrize("journal", [False, True])
def test_a_member_that_was_away_over_a_rollback_has_no_other_one_given_up(journal: bool, first: str) -> None:
    """Its horizon is of a later version than that which the job has gone back to, and its roster older."""
    table = forgetful()
    a, b, away = table.start("a", "b", "away")
    come_and_go(table, "pod")
    for number in range(3):
        a.take()
        a.propose(5 + 5 * number)
        table.tick(9.0 if number == 0 else 3.0)
        a.reduce()
        a.take()
        come_and_go(table, f"pod-{number}")
        b.take()
        away.take()
    assert table.version == 3 and away.machine.known.horizon.version == 4
    a.die()
    for seat in (b, away):
        seat.cut()
        seat.open()
        seat.take()
    away.cut()
    gone(table, "a")
    table.tick(1.0)
    b.open() if b.conn is None else b.take()
    table.tick(1.0)
    b.take()
    assert table.version == 0
    come_and_go(table, "pod-4")
    commit([b], 20)
    joined = Seat(table, "joined")
    joined.open()
    joined.take()
    joined.fetch(b)
    come_and_go(table, "pod-5")
    commit([b, joined], 25)
    joined.propose(30)
    restart(table, journal=journal)
    others = [away, b, joined] if first == "away" else [joined, b, away]
    for seat in others:
        seat.open()
        seat.take()
    table.tick(5.0)
    for seat in others:
        seat.take()
    assert table.coordinator.roster.members.keys() >= {"b", "joined"}
    assert not any(isinstance(x, r.Reset) for x in joined.asked)


def test_after_a_rollback_who_is_forgotten_stays_out_also_with_the_version_that_the_job_goes_on_from() -> None:
    table = Table(samples=Samples(samples=30, batch_size=1, epochs=1), wants=10, start_replicas=3)
    table.coordinator = Coordinator("j", now=table.now, kept_gone=0)
    a, b, c = table.start("a", "b", "c")
    c.use(4)
    c.cut()
    gone(table, "c")
    a.use(10)
    a.do(a.machine.ask())
    a.take()
    b.take()
    b.use(2)
    b.propose(2)
    table.tick(4.0)
    b.reduce()
    b.take()
    a.take()
    assert table.version == 1 and not table.coordinator.roster.gone
    b.die()
    a.cut()
    a.open()
    a.take()
    gone(table, "b")
    table.tick(1.0)
    a.open() if a.conn is None else a.take()
    table.tick(1.0)
    assert table.version == 0
    c.open()
    c.take()
    assert c.machine.lease.held == () and "evicted" in c.pop(r.Reset).reason


def test_a_member_that_was_away_brings_no_forgotten_ids_back() -> None:
    table = forgetful(8)
    a, b, away = table.start("a", "b", "away")
    for number in range(8):
        come_and_go(table, f"pod-{number}")
    away.take()
    away.cut()
    assert len(away.machine.known.gone) == 8
    for number in range(8, 20):
        come_and_go(table, f"pod-{number}")
        commit([a, b], 5 * number)
    told = len(table.events("gone"))
    away.open()
    away.take()
    assert len(table.events("gone")) == told and len(away.machine.known.gone) <= 10


def test_two_horizons_of_one_version_are_told_apart_by_their_life() -> None:
    """After a rollback the version stands still until the job has come to it again."""
    horizon = MovingHorizon(0, lambda incarnation_id: False)
    horizon.remember(e.replay([e.Epoch(2), e.Known("a", 1), e.Forgotten(m.Horizon(4, 5), ())]))
    hello = m.Hello(m.PROTOCOL, "j", "a", 1, 0, 1, 2, "a", "", 1, {}, {}, (), (), (), (("c", 5),), (), 0)
    assert horizon.knows_less(replace(hello, horizon=m.Horizon(4, 4)))
    assert not horizon.knows_less(replace(hello, horizon=m.Horizon(4, 5)))
    assert horizon.may_cover(("c", 5))
