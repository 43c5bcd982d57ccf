"""SPARE: who stands by takes no part, and the place of one that is lost."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Replaced, replay
from ftopt.sync.protocol.samples import Samples
from tests.sync.protocol.table import Seat, Table


def with_spares(*names: str, **settings: object) -> tuple[Table, Seat, Seat, list[Seat]]:
    """A job of A and B, at version 0, and spares that hold it."""
    table = Table(**settings)  # type: ignore[arg-type]
    a, b = table.start("a", "b")
    spares = [Seat(table, name, standby=True) for name in names]
    for spare in spares:
        spare.connect()
    assert all(spare.machine.complete and not spare.machine.may_train for spare in spares)
    return table, a, b, spares


def commit(*seats: Seat, step: int) -> None:
    """They make a version."""
    for seat in seats:
        seat.propose(step)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


def standing_by(*spares: Seat) -> list[str]:
    for spare in spares:
        spare.take()
    return [spare.name for spare in spares if spare.machine.standby]


def test_nobody_waits_for_a_spare_and_it_fetches_each_version() -> None:
    table, a, b, (s,) = with_spares("s")
    commit(a, b, step=5)
    assert table.version == 1, "at once, without the grace"
    s.fetch(a)
    assert s.record.version == 1


def test_a_spare_is_promoted_when_a_replica_has_been_away_for_two_heartbeats() -> None:
    table, a, b, (s,) = with_spares("s")
    b.die()
    assert standing_by(s) == ["s"], "one that lives connects again at once"
    table.tick(2.0)
    assert standing_by(s) == []
    assert s.machine.may_train
    commit(a, s, step=5)
    assert table.version == 1
    assert [x.data["in_place_of"] for x in table.events("promoted")] == ["b"]


def test_who_comes_back_at_once_is_not_replaced() -> None:
    table, _, b, (s,) = with_spares("s")
    b.cut()
    table.wait(1.0)
    b.connect()
    table.tick(30.0)
    assert standing_by(s) == ["s"]


def test_who_comes_back_after_its_place_was_taken_trains_too_and_no_second_spare_is_used() -> None:
    table, a, b, spares = with_spares("s", "t")
    b.cut()
    table.tick(2.0)
    assert standing_by(*spares) == ["t"]
    b.connect()
    b.cut()
    table.tick(30.0)
    assert standing_by(*spares) == ["t"]
    b.connect()
    commit(a, b, spares[0], step=5)
    assert table.version == 1
    b.say(m.Bye(early=True))
    table.tick(30.0)
    assert standing_by(*spares) == ["t"]


def test_the_spare_with_the_newest_state_is_promoted_then_the_first_by_id() -> None:
    table, a, b, (s, t, u) = with_spares("s", "t", "u")
    commit(a, b, step=5)
    t.fetch(a)
    u.fetch(a)
    b.die()
    table.tick(2.0)
    assert standing_by(s, t, u) == ["s", "u"]


def test_a_spare_that_dies_is_no_loss() -> None:
    table, _, _, (s, t) = with_spares("s", "t")
    s.die()
    table.tick(30.0)
    assert standing_by(t) == ["t"]


def test_a_promoted_spare_that_dies_is_replaced_by_the_next() -> None:
    table, _, b, (s, t) = with_spares("s", "t")
    b.die()
    table.tick(2.0)
    assert standing_by(s, t) == ["t"]
    s.die()
    table.tick(2.0)
    assert standing_by(t) == []


def again_as_a_spare(seat: Seat) -> Seat:
    """It is killed, and started again at once, with ``standby``."""
    seat.die()
    spare = Seat(seat.table, seat.name, standby=True)
    spare.connect()
    return spare


def test_a_promoted_spare_that_dies_and_is_started_again_as_a_spare_trains_again() -> None:
    table, a, b, (s,) = with_spares("s")
    b.die()
    table.tick(2.0)
    assert standing_by(s) == []
    s = again_as_a_spare(s)
    assert standing_by(s) == [], "b is missing still"
    commit(a, s, step=5)
    assert table.version == 1
    table.tick(30.0)
    assert [x.replica for x in table.events("promoted")] == ["s", "s"]


def test_who_comes_back_at_once_as_a_spare_is_replaced_once() -> None:
    table, _, b, (s,) = with_spares("s")
    b = again_as_a_spare(b)
    table.tick(30.0)
    assert len(standing_by(b, s)) == 1
    assert len(table.events("promoted")) == 1


def test_who_comes_back_as_a_spare_after_its_place_was_taken_is_the_next_spare() -> None:
    table, _, b, (s,) = with_spares("s")
    b.die()
    table.tick(2.0)
    b = Seat(table, "b", standby=True)
    b.connect()
    table.tick(30.0)
    assert standing_by(b, s) == ["b"]


def test_who_is_started_again_as_a_spare_while_no_coordinator_is_there_is_replaced() -> None:
    table, a, b, (s,) = with_spares("s")
    table.restart(journal=True)
    for seat in (a, s):
        seat.connect()
    b = again_as_a_spare(b)
    table.tick(5.0)
    assert len(standing_by(b, s)) == 1
    table.restart(journal=True)
    for seat in (a, b, s):
        seat.open()
    for seat in (a, b, s):
        seat.take()
    table.tick(5.0)
    assert len(standing_by(b, s)) == 1


def test_one_that_leaves_early_is_replaced_and_one_that_has_finished_is_not() -> None:
    table, _, b, (s, t) = with_spares("s", "t")
    b.say(m.Bye(early=True))
    assert standing_by(s, t) == ["t"]
    s.say(m.Bye())
    table.tick(30.0)
    assert standing_by(t) == ["t"]


def test_spares_are_sent_home_when_the_last_replica_has_finished() -> None:
    table, a, b, (s,) = with_spares("s")
    commit(a, b, step=5)  # the spare has not fetched that, and nobody waits for it
    a.say(m.Bye())
    assert s.got(m.Over) == []
    b.say(m.Bye())
    s.take()
    assert isinstance(s.pop(m.Over), m.Over)
    assert s.conn is None
    assert not table.coordinator.roster.members


def test_who_was_killed_and_replaced_keeps_no_spare_there_at_the_end() -> None:
    table, a, b, (s, t) = with_spares("s", "t")
    b.die()
    table.tick(2.0)
    for seat in (s, a):
        seat.take()
        seat.say(m.Bye())
    t.take()
    assert isinstance(t.pop(m.Over), m.Over)


def test_a_spare_that_comes_back_to_a_restarted_coordinator_after_the_end_is_sent_home() -> None:
    table, a, b, (s, t) = with_spares("s", "t")
    b.die()
    table.tick(2.0)
    t.cut()
    for seat in (s, a):
        seat.take()
        seat.say(m.Bye())
    table.restart(journal=True)
    t.connect()
    table.tick(10.0)
    t.take()
    assert isinstance(t.pop(m.Over), m.Over), "who was killed and replaced is on the roster still"


def test_a_lone_spare_is_sent_home_by_a_coordinator_that_has_lost_its_journal() -> None:
    table, a, b, (_, t) = with_spares("s", "t")
    for seat in (a, b):
        t.take()
        seat.say(m.Bye())
    t.machine.receive(m.RosterUpdate((), (("a", 1), ("b", 1), ("s", 1))))  # the last that it hears
    table.restart(journal=False)
    t.connect()
    table.tick(10.0)
    t.take()
    assert isinstance(t.pop(m.Over), m.Over)


def test_a_new_spare_is_sent_home_by_a_coordinator_that_was_started_again_after_the_end() -> None:
    table, a, b, (s,) = with_spares("s")
    b.die()
    table.tick(2.0)
    for seat in (s, a):
        seat.take()
        seat.say(m.Bye())
    table.restart(journal=True)
    late = Seat(table, "t", standby=True)
    late.connect()
    assert isinstance(late.pop(m.Over), m.Over), "b was killed and replaced: it is not waited for"
    b = Seat(table, "b")
    b.connect()
    late = Seat(table, "t", standby=True)
    late.connect()
    assert late.conn is not None, "one that trains is there"


def test_what_is_known_of_those_that_were_replaced_does_not_grow_without_end() -> None:
    table, a, b, (s,) = with_spares("s")
    for _ in range(5):
        new = b.die()
        table.tick(2.0)
        assert standing_by(s) == []
        s.say(m.Bye())
        new.connect()
        b, s = new, Seat(table, "s", standby=True)
        s.connect()
        a.take()
    assert standing_by(s) == ["s"]
    assert replay(table.journal).replaced == ()
    spares = table.coordinator.members.spares
    assert (spares._journalled, spares._replaced) == ({("s", 6)}, {})


def test_all_replicas_die_at_once_and_the_spare_goes_on_with_what_it_holds() -> None:
    table, a, b, (s,) = with_spares("s")
    commit(a, b, step=5)
    s.fetch(a)
    a.die()
    b.die()
    table.tick(2.0)
    assert standing_by(s) == []
    commit(s, step=5)
    assert table.version == 2


def test_a_spare_that_lacks_the_last_version_of_the_dead_goes_on_from_its_own() -> None:
    table, a, b, (s,) = with_spares("s")
    commit(a, b, step=5)
    a.die()
    b.die()
    s.take()
    s.do(s.machine.fetch_failed(0))
    table.tick(31.0)  # recovery_s: the only holders are evicted
    assert s.conn is None, "the job starts up again"
    s.connect()
    table.tick(5.0)
    assert standing_by(s) == []
    commit(s, step=5)
    assert table.version == 1


def test_a_coordinator_that_dies_between_its_journal_and_the_word_promotes_the_same_spare() -> None:
    table, a, b, (s, t) = with_spares("s", "t")
    b.die()
    table.tick(2.0)
    s.inbox.clear()  # the word is lost
    table.restart(journal=True)
    for seat in (a, s, t):
        seat.connect()
    table.tick(10.0)
    assert standing_by(s, t) == ["t"]
    assert sum(isinstance(x, Replaced) for x in table.journal) == 1


def test_a_loss_while_no_coordinator_is_there_is_not_forgotten() -> None:
    table, a, b, (s,) = with_spares("s")
    table.restart(journal=True)
    b.die()
    for seat in (a, s):
        seat.connect()
    table.tick(10.0)
    assert standing_by(s) == []


def test_one_that_leaves_early_while_the_spare_is_away_is_replaced_when_that_is_back() -> None:
    table, a, b, (s,) = with_spares("s")
    s.cut()
    b.say(m.Bye(early=True))
    table.restart(journal=True)
    a.connect()
    s.connect()
    table.tick(10.0)
    assert standing_by(s) == []
    assert replay(table.journal).replaced[0].spare == ("s", 1)


def test_one_that_left_early_as_the_coordinator_died_is_replaced_once() -> None:
    """Its loss is in the journal, and that it has gone is not: it is on the roster, and away."""
    table, a, b, (s, t) = with_spares("s", "t")
    s.cut()
    t.cut()
    b.say(m.Bye(early=True))
    del table.journal[1 + [isinstance(x, Replaced) for x in table.journal].index(True) :]
    table.restart(journal=True)
    for seat in (a, s, t):
        seat.connect()
    table.tick(20.0)
    for seat in (s, t):
        if seat.conn is None:
            seat.connect()
    assert len(standing_by(s, t)) == 1


def test_one_that_came_back_as_a_spare_as_the_coordinator_died_is_replaced_once() -> None:
    """Its loss is in the journal, and that it has gone is not: its next process comes in its place once more."""
    table, a, b, (s, t) = with_spares("s", "t")
    b = again_as_a_spare(b)
    del table.journal[1 + [isinstance(x, Replaced) for x in table.journal].index(True) :]
    table.restart(journal=True)
    b = Seat(table, "b", standby=True)
    for seat in (a, b, s, t):
        seat.connect()
    table.tick(20.0)
    assert len(standing_by(b, s, t)) == 2


def test_one_that_left_early_and_is_back_before_the_spare_needs_no_other_in_its_place() -> None:
    table, a, b, (s,) = with_spares("s")
    s.cut()
    b.say(m.Bye(early=True))
    back = Seat(table, "b")
    back.connect()
    s.connect()
    assert standing_by(s) == ["s"]
    table.restart(journal=True)
    for seat in (a, back, s):
        seat.connect()
    for seat in (a, back):
        seat.take()
    table.tick(10.0)
    assert standing_by(s) == ["s"]


def test_spares_start_no_job() -> None:
    table = Table(start_replicas=2, start_s=5.0)
    spares = [Seat(table, name, standby=True) for name in ("a", "b")]
    for spare in spares:
        spare.connect()
    table.tick(100.0)
    assert not table.coordinator.running
    trainer = Seat(table, "c")
    trainer.connect()
    table.tick(10.0)
    assert trainer.machine.may_train
    assert standing_by(*spares) == ["a", "b"]


def test_a_job_that_ends_with_the_first_loss_has_no_spares() -> None:
    table = Table(on_loss="fail")
    table.start("a", "b")
    Seat(table, "s", standby=True).connect()
    (refused,) = table.events("refuse")
    assert "on_loss" in refused.data["reason"]


def test_a_spare_holds_no_units_before_it_is_promoted() -> None:
    samples = Samples(samples=100, batch_size=1, epochs=1)
    table, _, b, (s,) = with_spares("s", samples=samples, wants=10)
    assert s.machine.lease.held == ()
    b.die()
    table.tick(2.0)
    assert standing_by(s) == []
    assert s.machine.lease.held


def test_the_rest_of_the_data_does_not_wait_for_a_spare_that_a_restarted_coordinator_misses() -> None:
    samples = Samples(samples=100, batch_size=1, epochs=1)
    table, a, b, _ = with_spares("s", samples=samples, wants=10)
    table.restart(journal=True)
    for seat in (a, b):
        seat.connect()
    table.tick(4.0)
    for seat in (a, b):
        seat.take()
        seat.use(10)
        seat.propose(10)
    for seat in (a, b):
        seat.reduce()
    table.tick(4.0)
    for seat in (a, b):
        seat.take()
        assert seat.machine.lease.held, "what it may hold, if the journal is an old copy, is free when it is gone"


def test_joiners_that_come_at_once_are_sent_to_different_sources() -> None:
    table = Table(start_replicas=8)
    table.start(*(f"r{i}" for i in range(8)))
    named: list[str] = []
    first: list[str] = []
    for i in range(16):
        joiner = Seat(table, f"n{i:02}", initial="other")
        joiner.open()
        (behind,) = joiner.got(m.Behind)
        named += behind.sources
        first.append(behind.sources[0])
    assert {named.count(f"r{i}") for i in range(8)} == {8}
    assert {first.count(f"r{i}") for i in range(8)} == {2}


def test_a_fetch_that_failed_at_all_its_sources_is_sent_to_others_after_a_pause() -> None:
    table = Table(start_replicas=8)
    table.start(*(f"r{i}" for i in range(8)))
    joiner = Seat(table, "n", initial="other")
    joiner.connect()
    before = joiner.pop_fetch(0)
    joiner.do(joiner.machine.fetch_failed(0))
    assert joiner.got(m.Behind) == []
    table.tick(1.0)
    (behind,) = joiner.got(m.Behind)
    assert not set(behind.sources) & set(before.sources)
