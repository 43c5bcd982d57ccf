"""Scenarios with several fragments: each has its own versions, rounds, contributions and fetches."""

from __future__ import annotations

from dataclasses import replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.phases import INCOMPLETE
from ftopt.sync.protocol.coordinator.roster.effects import HISTORY
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table

GONE_AFTER_S = 600.0
"""Of the table."""


def commit(seats: list[Seat], last_step: int, fragment: int) -> None:
    """An outer step of one fragment."""
    for seat in seats:
        seat.propose(last_step, fragment)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


def test_21_a_joiner_fetches_each_fragment_at_a_moment_of_its_own_and_mixes_none() -> None:
    table = Table(fragments=2)
    a, b = table.start("a", "b")
    commit([a, b], 5, 0)
    c = Seat(table, "c", "random")
    c.open()
    c.take()
    fetches = [c.pop_fetch(f) for f in (0, 1)]
    served = [a.machine.fragments[f].serves() for f in (0, 1)]
    assert [x.position for x in served if x] == [x.position for x in fetches]
    assert served[0] is not None and served[1] is not None

    commit([a, b], 10, 1)  # while C fetches, fragment 1 moves on
    c.take()
    assert c.end_fetch(served[0])
    assert not c.machine.ready  # half of a state is not trained from
    assert c.machine.propose(m.Contribution(1, 0, 1, 1, 1.0)) == []
    assert c.end_fetch(served[1])  # the moment that was served, kept by its source
    assert (c.held(0).version, c.held(1).version) == (1, 0)
    c.fetch(a, 1)
    assert not c.end_fetch(served[1])  # of the past: not installed again
    assert not c.machine.install(replace(served[0], chain="0" * 32))
    assert c.machine.ready
    for f in (0, 1):
        assert c.held(f) == a.held(f) == b.held(f)
    assert [c.held(f).counted for f in (0, 1)] == [(("a", 1, 5), ("b", 1, 5)), (("a", 1, 10), ("b", 1, 10))]
    assert c.held(0).inner_step == 5  # of fragment 0, which is the job's

    for seat, step in ((a, 15), (b, 15), (c, 3)):
        seat.propose(step, 1)
    assert c.got(m.Quorum)[0].size == 3
    assert table.coordinator.rounds[0].gather.proposals == {}


def test_a_fragment_that_lags_behind_keeps_nobody_from_the_others_rounds() -> None:
    """A holder of fragment 0 that has not fetched fragment 1 yet is a member in the one, and none in the other (I5)."""
    table = Table(fragments=2)
    a, b = table.start("a", "b")
    a.propose(5, 1)
    table.tick(3.0)  # B's trainer hangs
    a.reduce()
    a.take()
    b.take()
    assert b.machine.fragments[1].fetching and not b.machine.fragments[0].fetching
    b.say(m.Heartbeat("training", 9, 0.1))
    for seat in (a, b):
        seat.propose(10, 0)
    assert [(q.fragment, q.size) for q in a.got(m.Quorum)] == [(0, 2)]
    a.propose(10, 1)
    table.tick(3.0)
    assert [(q.fragment, q.size) for q in a.got(m.Quorum)] == [(0, 2), (1, 1)]


def test_an_offer_never_crosses_the_start_that_voids_it() -> None:
    """A's fragment 1 is damaged, the coordinator has forgotten the job: what A holds may become version 0 anew."""
    table = Table(fragments=2, start_replicas=1)
    (a,) = table.start("a")
    table.restart(journal=False)
    a.machine.fragments[1].doubt()
    a.open()
    table.tick(31.0)
    a.propose(7, 0)  # between its hello and the welcome
    assert table.coordinator.running
    a.take()
    assert [a.held(f).version for f in (0, 1)] == [0, 0]
    assert all(not rounds.gather.proposals for rounds in table.coordinator.rounds)
    commit([a], 9, 0)
    assert a.held(0).counted == (("a", 1, 9),)
    assert not table.events("abort") and not table.events("rollback")


def test_a_job_that_starts_anew_resets_who_holds_some_fragments_of_its_state() -> None:
    """B alone held fragment 0 when it died: A's steps are lost with it, and A says so."""
    table = Table(fragments=2, start_replicas=2)
    a, b = table.start("a", "b")
    commit([a, b], 5, 1)
    a.cut()
    a.machine.fragments[0].doubt()
    a.open()
    b.die()
    a.take()
    a.do(a.machine.fetch_failed(0))
    table.tick(GONE_AFTER_S)
    assert table.events("rollback")
    a.open()
    table.tick(GONE_AFTER_S)
    a.take()
    assert a.pop(r.Reset).reason == INCOMPLETE
    assert ("a", 1) in table.coordinator.roster.gone_ids()
    a.open()
    table.tick(GONE_AFTER_S)
    a.take()
    assert (a.held(0).version, a.held(1).version) == (0, 0)
    assert a.machine.incarnation == 2


def test_what_was_held_back_is_offered_once_it_is_known_that_no_start_comes() -> None:
    table = Table(fragments=2)
    a, b = table.start("a", "b")
    a.cut()
    a.machine.fragments[1].doubt()
    a.propose(5, 0)
    a.open()
    a.take()
    assert a.machine.fragments[1].fetching
    assert list(table.coordinator.rounds[0].gather.proposals) == ["a"]
    b.propose(5, 0)
    assert b.got(m.Quorum)[0].size == 2


def test_states_that_were_named_are_kept_no_longer_than_a_fetch_needs_them() -> None:
    table = Table(start_replicas=1)
    (a,) = table.start("a")
    a.cut()
    a.conn = 77
    a.do(a.machine.receive(m.Welcome(2, 1, (), ())))
    named = [m.Position(0, version, f"{version:032}") for version in range(1, 2 * HISTORY)]
    a.do(a.machine.receive(m.Behind(named[0], ("b",), False)))
    for at in named[1:]:
        a.do(a.machine.receive(m.Behind(at, ("b",), False)))
    told = a.machine.fragments[0].named
    assert told == named[-HISTORY:]
    state = replace(a.record, version=told[0].version, chain=told[0].chain)
    assert a.machine.install(state)  # the fetch that is under way may bring any of them
    a.do(a.machine.fetched(state))
    assert a.machine.fragments[0].named == named[-1:]


def test_a_fetch_of_an_earlier_connection_that_fails_leaves_the_attempt_alone_that_runs_by_now() -> None:
    """Found by the walks, seed 5003623: the member list was lost, and with it the way to count the result."""
    table = Table(fragments=2, evict_after_s=4.0)
    a, b = table.start("a", "b")
    for fragment in (0, 1):
        a.propose(5, fragment)
        table.tick(3.0)
        a.reduce()
        a.take()
    b.take()
    a.cut()
    b.do(b.machine.fetch_failed(1))  # that of fragment 0 takes longer
    table.tick(4.0)  # the only holder of version 1 is gone: ROLLBACK
    b.connect()
    assert (table.version, b.record.version) == (0, 0)
    b.propose(9)
    b.take()
    start = b.pop(r.StartReduce)
    b.do(b.machine.fetch_failed(0))
    b.do(b.machine.reduced(0, start.quorum.attempt, "sum", [[9]]))
    b.take()
    assert b.record.counted == (("b", 1, 9),)
