"""RESTORE: everybody who held the job's state has died. Played by hand with the real machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.resumed import Held, another_life
from tests.sync.protocol.table import Seat, Table
from tests.sync.protocol.test_ledger_scenarios import commit, job
from tests.sync.protocol.test_resume import at_version_1, held, lose_all, round_of

COORDINATORS = ("lives", "journal")


def successor(table: Table, name: str, checkpoint: m.Record | None) -> Seat:
    """A process that is started in a dead one's place, and what its newest checkpoint holds."""
    seat = Seat(table, name)
    seat.machine.checkpoint = checkpoint.position if checkpoint else None
    return seat


def come(seats: Sequence[Seat]) -> None:
    """They connect, until none has to connect anew; a coordinator that starts up waits for the processes before them,
    which may live."""
    while away := [seat for seat in seats if seat.conn is None and not to_restore(seat)]:
        for seat in away:
            seat.open()
        for seat in seats:
            seat.take()
        if contested(seats[0].table):
            seats[0].table.wait(3.0)
        for seat in seats:
            seat.take()


def contested(table: Table) -> bool:
    """Whether a newcomer is there, and it is not known yet that the one before it is dead."""
    startup = table.coordinator.startup
    newcomers = {h.replica for h in startup.hellos.values() if not h.incarnation} if startup is not None else set()
    return not newcomers.isdisjoint(table.coordinator.roster.members)


def to_restore(seat: Seat) -> bool:
    """Whether it is sent for its checkpoint."""
    return any(isinstance(effect, r.RestoreCheckpoint) for effect in seat.asked)


def restore(seat: Seat, record: m.Record) -> None:
    """The checkpoint is read."""
    seat.pop(r.RestoreCheckpoint)
    if seat.conn is not None:
        seat.cut()
    seat.machine.restore(Held(seat.name, seat.machine.incarnation, 0, records=(record,)))


def all_dead_at_version_2(coordinator: str) -> tuple[Table, m.Record]:
    """The job, and what a checkpoint of version 1 holds."""
    table, seats = at_version_1("a", "b")
    saved = seats[0].record
    round_of(seats, 10)
    assert table.version == 2
    lose_all(table, seats, coordinator)
    return table, saved


@pytest.mark.parametrize("coordinator", COORDINATORS)
def test_the_job_goes_on_from_the_newest_checkpoint(coordinator: str) -> None:
    table, saved = all_dead_at_version_2(coordinator)
    a, b = (successor(table, name, saved) for name in ("a", "b"))
    come((a, b))
    assert to_restore(a) and to_restore(b)
    assert (a.machine.incarnation, b.machine.incarnation) == (2, 2)
    restore(a, saved), restore(b, saved)
    come((a, b))
    assert a.record == b.record == saved and a.machine.ready and a.machine.welcomed
    round_of((a, b), 5)
    assert a.record.counted == b.record.counted == (("a", 2, 5), ("b", 2, 5))
    assert (table.version, len(table.events("start"))) == (2, 1)


def test_who_has_none_fetches_from_those_who_have_restored_theirs() -> None:
    table, saved = all_dead_at_version_2("lives")
    a, b = successor(table, "a", saved), successor(table, "b", None)
    come((a, b))
    assert to_restore(a) and not to_restore(b)
    restore(a, saved)
    come((a, b))
    b.fetch(a)
    assert b.record == saved
    round_of((a, b), 5)


def test_who_restores_is_waited_for_however_long_it_reads() -> None:
    table, saved = all_dead_at_version_2("lives")
    a, b = successor(table, "a", saved), successor(table, "b", None)
    come((a, b))
    a.cut()
    table.tick(300)
    assert len(table.events("start")) == 1 and not table.coordinator.running
    restore(a, saved)
    come((a, b))
    assert a.machine.welcomed and table.coordinator.running


def test_only_the_newest_is_restored() -> None:
    table, (a, b) = at_version_1("a", "b")
    older = a.record
    round_of((a, b), 10)
    newer = a.record
    lose_all(table, (a, b), "lives")
    a, b = successor(table, "a", older), successor(table, "b", newer)
    come((a, b))
    assert to_restore(b) and not to_restore(a)


def test_one_that_cannot_be_read_is_no_reason_to_begin_anew() -> None:
    """Its holder is sent for it, and finds out what is wrong."""
    table, saved = all_dead_at_version_2("lives")
    a, b = successor(table, "a", saved), successor(table, "b", saved)
    b.machine.checkpoint = m.Position(0, 0, "")
    come((a, b))
    assert to_restore(a) and to_restore(b)


@pytest.mark.parametrize("coordinator", (*COORDINATORS, "new"))
def test_another_job_s_checkpoint_is_not_restored(coordinator: str) -> None:
    """Nor that of a job that the coordinator has never heard of: who wants that says `checkpoint.resume`."""
    table, saved = all_dead_at_version_2(coordinator)
    if coordinator != "new":
        saved = m.Record(0, 7, "of another", 70)
    a, b = (successor(table, name, saved) for name in ("a", "b"))
    come((a, b))
    table.tick(31.0)  # without a journal, for replicas that may live
    a.take(), b.take()
    assert not to_restore(a) and not to_restore(b)
    assert a.record.version == b.record.version == 0 and len(table.events("start")) == 2
    told = a.pop(r.Notice).text
    assert (
        told.endswith("it starts anew") == told.startswith("the job had come to version 2, ") == (coordinator != "new")
    )


def test_nobody_restores_while_somebody_holds_the_state() -> None:
    table, (a, b) = at_version_1("a", "b")
    saved = a.record
    round_of((a, b), 10)
    a.cut()
    a = successor(table, "a", saved)
    come((a,))
    assert not to_restore(a)
    a.fetch(b)
    assert a.record.version == 2


@pytest.mark.parametrize(
    ("coordinator", "told"),
    [
        ("lives", "no connected replica holds the newest version, and b may: outer steps and joins wait for that, "),
        (
            "journal",
            "waiting for b, 597 s at most (policy.evict_after_s): if it still runs, it may hold the job's state, and "
            "steps that no checkpoint has. If it has ended, start a replica with this id again, which ends the wait",
        ),
    ],
)
def test_nobody_restores_while_somebody_who_is_away_may_hold_the_state(coordinator: str, told: str) -> None:
    table, (a, b) = at_version_1("a", "b")
    saved = a.record
    round_of((a, b), 10)
    lose_all(table, (a, b), coordinator)
    a = successor(table, "a", saved)
    come((a,))
    table.tick(300)
    assert not to_restore(a) and len(table.events("start")) == 1
    assert a.pop(r.Notice).text.startswith(told)
    b.connect()
    a.take(), b.take()
    a.fetch(b)
    assert a.record.version == 2


def test_a_replica_with_the_id_of_one_that_is_waited_for_ends_the_wait() -> None:
    table, saved = all_dead_at_version_2("journal")
    a, b = successor(table, "a", saved), successor(table, "b", None)
    come((a,))
    table.tick(300)
    assert not to_restore(a)
    come((b,))
    a.take()
    assert to_restore(a)


def test_a_replica_that_holds_a_state_ignores_it() -> None:
    _, (a, _) = at_version_1("a", "b")
    assert a.machine.receive(m.Restore(7)) == [] and a.machine.incarnation == 1


def test_no_life_is_lived_again_that_the_checkpoint_knows() -> None:
    """The coordinator has an old copy of its journal, and gives the first lives away again; the state counts them."""
    table, (a, b) = at_version_1("a", "b")
    saved, there = a.record, [held(a), held(b)]
    lose_all(table, (a, b), "lives")
    table.journal[:] = [entry for entry in table.journal if not isinstance(entry, e.Known)]
    table.restart(journal=True)
    a, b = successor(table, "a", saved), successor(table, "b", None)
    come((a, b))
    assert to_restore(a) and a.machine.incarnation == 1
    life = another_life(("a", 1), there, [saved])
    assert (life.incarnation_id, life.gone) == (("a", 2), {"a": 1, "b": 1})
    a.pop(r.RestoreCheckpoint)
    a.cut()
    a.machine.restore(replace(life, records=(saved,)))
    come((a, b))
    b.fetch(a)
    assert (a.machine.incarnation, b.machine.incarnation) == (2, 2)
    assert not [x for x in b.asked if isinstance(x, r.Reset)]
    round_of((a, b), 3)
    assert a.record.counted == (("a", 2, 3), ("b", 2, 3))


@pytest.mark.parametrize("coordinator", ["lives", "new"])
def test_who_reads_a_checkpoint_is_waited_for_whatever_life_that_makes_it(coordinator: str) -> None:
    """Another one that has read it tells that the life is gone which the coordinator had given; a new one without a
    journal hears from it which life that makes."""
    table, (a, b) = at_version_1("a", "b")
    saved, there = a.record, [held(a), held(b)]
    lose_all(table, (a, b), "lives")
    table.journal[:] = [entry for entry in table.journal if not isinstance(entry, e.Known)]
    table.restart(journal=True)
    a, b = seats = [successor(table, name, saved) for name in ("a", "b")]
    come(seats)
    for seat in seats:
        seat.pop(r.RestoreCheckpoint)
        seat.cut()
    if coordinator == "new":
        table.restart(journal=False)
    for seat in seats:
        assert not table.coordinator.running, "b is waited for"
        life = another_life((seat.name, seat.machine.incarnation), there, [saved])
        seat.machine.restore(replace(life, records=(saved,)))
        come((seat,))
    assert table.coordinator.running
    assert table.coordinator.roster.incarnation_ids() == (("a", 2), ("b", 2))


def test_a_coordinator_that_forgets_who_reads_a_checkpoint_waits_for_all_of_them() -> None:
    table, saved = all_dead_at_version_2("journal")
    a, b = (successor(table, name, saved) for name in ("a", "b"))
    come((a, b))
    a.cut(), b.cut()
    table.restart(journal=False)
    for seat in (a, b):
        assert not table.coordinator.running
        restore(seat, saved)
        come((seat,))
    assert table.coordinator.running


def test_what_one_holds_that_reads_its_checkpoint_for_long_is_granted_to_nobody() -> None:
    """CURSOR: the coordinator's journal is a copy from before any grant; what is granted follows all that was granted
    to anybody in the checkpoint."""
    table, (a, b) = job("a", "b")
    commit(a, b, units=2, last_step=2)
    saved = a.record
    used = {"a": (), "b": ((12, 14),)}
    there = [replace(held(x), cursor=x.machine.lease.cursor, used=used[x.name]) for x in (a, b)]
    lose_all(table, (a, b), "lives")
    table.journal[:] = [entry for entry in table.journal if not isinstance(entry, e.Known | e.Cursor)]
    table.restart(journal=True)
    a, b = seats = [successor(table, name, saved) for name in ("a", "b")]
    come(seats)
    for seat in seats:
        seat.pop(r.RestoreCheckpoint)
        seat.cut()
    for seat, wait_s in ((a, 30.0), (b, 0.0)):
        life = another_life((seat.name, seat.machine.incarnation), there, [saved])
        seat.machine.restore(replace(life, records=(saved,), used=used[seat.name]))
        seat.open()
        table.wait(wait_s)
        seat.take()
        assert table.coordinator.running
    assert a.machine.lease.held
    assert (12, 14) in b.machine.lease.held
    assert not table.events("held_twice")


def leave(seat: Seat) -> None:
    """In good order, before its end."""
    seat.do(seat.machine.say(m.Leaving()))
    seat.say(m.Bye(early=True))


@pytest.mark.parametrize("back", ["with its checkpoint", "without one", "not at all"])
def test_who_left_with_a_newer_version_is_waited_for_before_the_job_goes_back_to_a_checkpoint(back: str) -> None:
    """All have left in good order, one after the other; the first one comes back first."""
    table = Table(start_replicas=1, evict_after_s=300.0)
    a, b = table.start("a", "b")
    round_of((a, b), 10)
    early = a.record
    leave(a)
    round_of((b,), 20)
    late = b.record
    leave(b)
    a, b = Seat(table, "a"), Seat(table, "b")
    a.machine.checkpoint, b.machine.checkpoint = early.position, late.position if back.startswith("with ") else None
    a.open()
    a.take()
    assert a.pop(r.Notice).text.startswith(
        "waiting for b, 300 s at most (policy.evict_after_s): it has left with version 2, inner step 20, which is newer"
    )
    table.tick(200.0)
    a.take()
    assert not a.got(m.Restore) and not table.events("restore")
    if back == "not at all":
        table.tick(200.0)
    else:
        b.open()
        b.take()
    restores = b if back == "with its checkpoint" else a
    restores.take()
    assert restores.pop(r.RestoreCheckpoint)
    assert [x.version for x in table.events("restore")] == [2 if restores is b else 1]


def test_a_job_that_goes_back_says_so_to_all() -> None:
    table = Table(start_replicas=1, evict_after_s=300.0)
    (a,) = table.start("a")
    round_of((a,), 10)
    early = a.record
    round_of((a,), 20)
    leave(a)
    a = Seat(table, "a")
    a.machine.checkpoint = early.position
    come((a,))
    restore(a, early)
    come((a,))
    text = next(x.text for x in a.asked if isinstance(x, r.Notice) and "goes back" in x.text)
    assert text == (
        "the job goes back from version 2, inner step 20, which nobody who is here holds, to version 1: the outer "
        "steps in between are undone"
    )
    assert [x.data["undone"] for x in table.events("recover")] == [text]
