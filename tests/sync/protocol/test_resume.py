"""Replicas that come back out of a checkpoint, played by hand with the real machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.effects import COUNTED_ELSEWHERE
from ftopt.sync.protocol.replica.resumed import Held, apart, given_up, known_to, returning
from ftopt.sync.protocol.samples import Samples
from tests.sync.protocol.table import Seat, Table
from tests.sync.protocol.test_fragments import commit
from tests.sync.protocol.test_startup import let_pass


def held(seat: Seat) -> Held:
    """What a checkpoint keeps of a replica."""
    machine = seat.machine
    contribution = machine.fragments[0].contribution
    return Held(
        seat.name,
        machine.incarnation,
        machine.epoch,
        dict(machine.known.gone),
        records=(seat.record,),
        contributions=(contribution,) if contribution else (),
    )


def resume(table: Table, there: Sequence[Held], *present: str) -> list[Seat]:
    """All have died; those who are ``present`` now go on from a checkpoint and connect."""
    newest = max((each.records[0] for each in there), key=lambda record: record.version)
    back = returning(there, present, [newest])
    lives = {each.replica: each for each in there}
    seats = []
    for name in present:
        was = lives.get(name, Held(name, 0, 0, records=(newest,)))
        seat = Seat(table, name)
        now = Held(name, back.incarnation_ids[name], back.epoch, back.gone, back.incarnation_ids)
        seat.machine.resume(replace(now, records=was.records, contributions=was.contributions))
        seats.append(seat)
    for seat in seats:
        seat.open()
    for seat in seats:
        seat.take()
    if not table.coordinator.running:  # with a journal: those whose incarnations they claim might live
        let_pass(table, 3, *seats)
    return seats


def at_version_1(*names: str) -> tuple[Table, list[Seat]]:
    """All have contributed five steps."""
    table = Table()
    seats = table.start(*names)
    round_of(seats, 5)
    return table, seats


def round_of(seats: Sequence[Seat], last_step: int) -> None:
    """A round of all of them."""
    for seat in seats:
        if not seat.machine.fragments[0].outstanding:
            seat.propose(last_step)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


def lose_all(table: Table, seats: Sequence[Seat], coordinator: str) -> None:
    """Everybody dies; the coordinator lives, is started anew with its journal, or without."""
    for seat in seats:
        if seat.conn is not None:
            seat.cut()
    if coordinator != "lives":
        table.restart(journal=coordinator == "journal")


def reconnect(table: Table, *seats: Seat) -> None:
    """They connect, as often as the coordinator begins anew, until it runs."""
    for _ in range(20):
        for seat in seats:
            if seat.conn is None:
                seat.connect()
            seat.take()
        table.tick(1.0)


COORDINATORS = ("new", "journal", "lives")


@pytest.mark.parametrize("coordinator", ("new", "journal"))  # one that lives waits for nobody who is away
def test_a_contribution_under_way_is_offered_again_and_counted_once(coordinator: str) -> None:
    table, (a, b) = at_version_1("a", "b")
    offered = a.propose(10)
    there = [held(a), held(b)]
    lose_all(table, (a, b), coordinator)
    a, b = resume(table, there, "a", "b")
    assert a.machine.welcomed and a.record == there[0].records[0] and a.machine.fragments[0].contribution == offered
    round_of((a, b), 10)
    assert a.record.counted == b.record.counted == (("a", 1, 10), ("b", 1, 10))
    assert a.record.version == 2


@pytest.mark.parametrize("coordinator", ("new", "journal"))
@pytest.mark.parametrize("ids", (("a", "b"), None))
def test_each_goes_on_from_a_checkpoint_of_its_own_part_alone(coordinator: str, ids: Sequence[str] | None) -> None:
    """Neither ends the other, of which it knows nothing but that its steps are counted."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    lose_all(table, (a, b), coordinator)
    seats = []
    for was in there:
        present = ids or {was.replica, *apart([was], was.records)}
        back = known_to(was.replica, returning([was], present, was.records), [was], was.records)
        assert (back.incarnation_ids, back.gone) == ({"a": 1, "b": 1}, {})
        seat = Seat(table, was.replica)
        now = Held(was.replica, back.incarnation_ids[was.replica], back.epoch, back.gone, back.incarnation_ids)
        seat.machine.resume(replace(now, records=was.records))
        seats.append(seat)
    for seat in seats:
        seat.open()
        seat.take()
    let_pass(table, 3, *seats)
    assert all(seat.machine.welcomed and seat.machine.incarnation == 1 for seat in seats)
    round_of(seats, 10)
    assert seats[0].record.counted == seats[1].record.counted == (("a", 1, 10), ("b", 1, 10))


@pytest.mark.parametrize("coordinator", COORDINATORS)
def test_versions_after_the_checkpoint_are_rolled_back(coordinator: str) -> None:
    """The steps of version 2 are done again, and version 2 is made again: with the same bits, the same chain."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    round_of((a, b), 10)
    chain = a.record.chain
    lose_all(table, (a, b), coordinator)
    a, b = resume(table, there, "a", "b")
    for seat in (a, b):  # after a rollback the coordinator asks for another hello
        if seat.conn is None:
            seat.open()
    a.take(), b.take()
    assert (a.record.version, b.record.version) == (1, 1)
    assert not [x for x in (*a.asked, *b.asked) if isinstance(x, r.Fetch) and x.sources]
    round_of((a, b), 10)
    assert a.record.counted == (("a", 1, 10), ("b", 1, 10))
    assert a.record.chain == chain


@pytest.mark.parametrize("rounds", (0, 1, 2, 4))
def test_a_copy_of_the_journal_from_before_the_job_was_resumed_takes_no_state_from_those_who_live(rounds: int) -> None:
    """They know a later epoch than the copy, and hold another branch than it tells of, which ended with its holders."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    round_of((a, b), 10)
    round_of((a, b), 15)
    copy = list(table.journal)
    lose_all(table, (a, b), "journal")
    a, b = resume(table, there, "a", "b")
    reconnect(table, a, b)
    for number in range(rounds):
        round_of((a, b), 12 + 2 * number)
    record = a.record
    assert record.version == 1 + rounds
    table.journal[:] = copy
    table.restart(journal=True)
    reconnect(table, a, b)
    assert not table.events("fork")
    assert (a.record, b.record, table.version) == (record, record, record.version)
    round_of((a, b), 30)
    assert a.record.counted == b.record.counted == (("a", 1, 30), ("b", 1, 30))


def test_who_does_not_come_back_is_gone_and_nobody_waits() -> None:
    table, seats = at_version_1("a", "b", "c")
    there = [held(seat) for seat in seats]
    lose_all(table, seats, "new")
    a, b = resume(table, there, "a", "b")
    round_of((a, b), 10)
    assert a.record.version == 2
    assert {incarnation_id[:2] for incarnation_id in a.record.counted} == {("a", 1), ("b", 1)}
    assert a.machine.known.gone == {"c": 1}


def test_one_that_was_not_there_holds_the_newest_state_and_is_waited_for() -> None:
    table, seats = at_version_1("a", "b")
    there = [held(seat) for seat in seats]
    lose_all(table, seats, "new")
    a, b, c = resume(table, there, "a", "b", "c")
    assert c.record == a.record and c.machine.incarnation == 1
    a.propose(10), b.propose(10)
    assert not a.got(m.Quorum)
    c.propose(3)
    round_of((a, b, c), 0)
    assert c.record.counted == (("a", 1, 10), ("b", 1, 10), ("c", 1, 3))


def test_one_that_was_saved_a_version_behind_learns_that_it_was_counted() -> None:
    """b was saved before it had applied version 1, with the contribution that is in it."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5), b.propose(5)
    behind = held(b)
    a.reduce(), b.reduce()
    a.take()
    there = [held(a), behind]
    lose_all(table, (a, b), "new")
    a, b = resume(table, there, "a", "b")
    assert b.machine.fragments[0].outstanding
    b.fetch(a)
    assert b.record == a.record and not b.machine.fragments[0].outstanding
    assert b.machine.counted_step(b.record) == 5


def test_a_journal_that_knows_a_later_life_makes_the_earlier_one_begin_anew() -> None:
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    b = b.die()
    b.connect()
    b.fetch(a)
    assert b.machine.incarnation == 2
    lose_all(table, (a, b), "journal")
    a, b = resume(table, there, "a", "b")
    assert [x.reason for x in b.asked if isinstance(x, r.Reset)]


@pytest.mark.parametrize("again", ("resumed", "restored"))
def test_who_goes_on_at_the_end_of_the_data_learns_that_they_have_ended(again: str) -> None:
    """Nothing is ever committed any more that would tell it, and no units are left to wait for."""
    table = Table(samples=Samples(samples=6, batch_size=1, epochs=1), wants=6)
    a, b = table.start("a", "b")
    for seat in (a, b):
        seat.take()
        seat.use(3)
    round_of((a, b), 3)
    record = a.record
    assert record.done == ((0, 6),)
    lose_all(table, (a, b), "new")
    seat = Seat(table, "a")
    back = Held("a", 1, a.machine.epoch, roster={"a": 1}, records=(record,), samples=table.samples)
    if again == "resumed":
        seat.machine.resume(back)
    else:
        seat.machine.restore(back)
    seat.open()
    said = [effect for message in seat.inbox for effect in seat.machine.receive(message)]
    assert [(x.done, x.own) for x in said if isinstance(x, r.Settled)] == [(record.done, ())]


def test_who_comes_back_is_alike_whoever_computes_it() -> None:
    record = m.Record(0, 3, "c", 30, (("a", 2, 30), ("b", 1, 30), ("z", 4, 7)))
    there = [Held("a", 2, 7, {"a": 1, "y": 3}), Held("b", 1, 9, {"y": 2}), Held("c", 5, 8)]
    same = returning(there, ["a", "b", "c"], [record])
    assert same.incarnation_ids == {"a": 2, "b": 1, "c": 5}
    assert (same.epoch, same.adopted_by) == (9, {})
    assert same.gone == {"a": 1, "y": 3, "z": 4}
    fewer = returning(there, ["b"], [record])
    assert fewer.gone == {"a": 2, "c": 5, "y": 3, "z": 4}
    assert fewer.adopted_by == {"a": "b", "c": "b"}
    others = returning(there, ["a", "y", "z"], [record])
    assert others.incarnation_ids == {"a": 2, "y": 4, "z": 5}
    assert others.adopted_by == {"b": "a", "c": "a"}
    strangers = returning(there, ["p", "q"], [record])
    assert strangers.adopted_by == {"a": "p", "b": "q", "c": "p"}


def test_no_unit_is_queued_by_two_that_come_back() -> None:
    """b gave its part after a had left, with units that it had been granted of those that a has in its own part."""
    record = m.Record(0, 3, "c", 30, (("a", 1, 30), ("b", 1, 30)))
    a = Held("a", 1, 7, records=(record,), used=((0, 2),), queue=((8, 10), (4, 6)))
    b = Held("b", 1, 7, {"a": 1}, records=(record,), used=((5, 6),), queue=((9, 12), (1, 3), (4, 5)))
    c = Held("c", 1, 7, records=(record,), used=((11, 12),), queue=((20, 22),))
    assert returning([b, c, a], ["a", "b", "c"], [record]).queues == {
        "a": ((8, 10), (4, 5)),
        "b": ((10, 11), (2, 3)),
        "c": ((20, 22),),
    }
    fewer = returning([a, b, c], ["b", "d"], [record])
    assert fewer.queues == {"b": ((9, 11), (2, 3), (4, 5))}


def twin_of(table: Table, name: str, there: Sequence[Held], *present: str) -> Seat:
    """Another process of a replica that lives goes on from the checkpoint: a supervisor was too quick."""
    newest = max((each.records[0] for each in there), key=lambda record: record.version)
    back = returning(there, present, [newest])
    was = next(each for each in there if each.replica == name)
    twin = Seat(table, name, address="elsewhere")
    now = Held(name, back.incarnation_ids[name], back.epoch, back.gone, back.incarnation_ids)
    twin.machine.resume(replace(now, records=was.records, contributions=was.contributions))
    return twin


@pytest.mark.parametrize("coordinator", COORDINATORS)
@pytest.mark.parametrize("first", [True, False])
def test_who_resumes_under_the_id_of_a_living_replica_waits_and_is_refused(coordinator: str, first: bool) -> None:
    """STICKY: a checkpoint names an incarnation, but another process has it, with steps that are in no checkpoint."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    round_of((a, b), 10)
    a.propose(15)
    if coordinator != "lives":
        table.restart(journal=coordinator == "journal")
    twin = twin_of(table, "a", there, "a", "b")
    if first:
        twin.connect()
    if coordinator != "lives":
        a.connect()
    if not first:
        twin.connect()
    if coordinator != "lives":
        b.connect()
    let_pass(table, 8, a, b, twin)
    assert a.machine.welcomed and not twin.machine.welcomed
    assert (a.machine.incarnation, a.record.version) == (1, 2)
    assert a.machine.fragments[0].outstanding, "its pending steps are still on offer"
    assert not table.events("gone")
    assert "end the other process" in twin.pop(r.GiveUp).reason


@pytest.mark.parametrize("coordinator", COORDINATORS)
def test_who_resumes_while_its_predecessor_leaves_joins_when_that_has_left(coordinator: str) -> None:
    """What its predecessor had is handed over, so that it is a newcomer."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    if coordinator != "lives":
        table.restart(journal=coordinator == "journal")
        a.connect()
        b.connect()
        let_pass(table, 1, a, b)
    a.do(a.machine.say(m.Leaving()))
    twin = twin_of(table, "a", there, "a", "b")
    twin.connect()
    let_pass(table, 5, a, b, twin)
    assert a.machine.welcomed and not twin.machine.welcomed
    a.say(m.Bye())
    let_pass(table, 2, b, twin)
    if twin.conn is None:
        twin.connect()
    let_pass(table, 2, b, twin)
    assert (twin.machine.welcomed, twin.machine.incarnation) == (True, 2)


def test_of_two_processes_of_one_incarnation_one_ends() -> None:
    """The second one was let in while the first one's link was down: they do not throw each other out for ever."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    a.cut()
    twin = twin_of(table, "a", there, "a", "b")
    twin.connect()
    let_pass(table, 1, b, twin)
    assert twin.machine.welcomed
    a.connect()
    let_pass(table, 8, a, b, twin)
    assert twin.machine.welcomed
    assert "end the other process" in a.pop(r.GiveUp).reason
    assert len(table.events("return")) == 1


@pytest.mark.parametrize("restarted", [True, False])
def test_a_checkpoint_puts_nobody_out_who_lives(restarted: bool) -> None:
    """One resumes with fewer replicas than the checkpoint has, while all the others live: it is a newcomer."""
    table, (a, b, c) = at_version_1("a", "b", "c")
    there = [held(a), held(b), held(c)]
    a.cut()
    c.propose(10)
    if restarted:
        table.restart(journal=True)
        b.connect()
        c.connect()
    twin = twin_of(table, "a", there, "a", "b")
    twin.connect()
    let_pass(table, 2, b, c, twin)
    if twin.conn is None:
        twin.connect()
    let_pass(table, 8, b, c, twin)
    assert c.machine.welcomed and c.machine.incarnation == 1 and c.machine.fragments[0].outstanding
    assert (twin.machine.welcomed, twin.machine.incarnation) == (True, 2)
    assert "c" in twin.pop(r.Reset).reason


def test_of_a_newcomer_and_one_that_resumes_the_latter_has_the_id() -> None:
    """All have died; it brings steps that are pending."""
    table, (a, b) = at_version_1("a", "b")
    offered = a.propose(10)
    there = [held(a), held(b)]
    lose_all(table, (a, b), "new")
    newcomer = Seat(table, "a", address="elsewhere")
    newcomer.connect()
    a, b = resume(table, there, "a", "b")
    let_pass(table, 1, a, b, newcomer)
    assert a.machine.welcomed and a.machine.fragments[0].contribution == offered
    assert not newcomer.machine.welcomed


@pytest.mark.parametrize(("journal", "away_s"), [(True, 2), (False, 2), (False, 20)])
def test_who_resumes_while_the_coordinator_starts_up_takes_nobodys_place_who_is_back_in_time(
    journal: bool, away_s: int
) -> None:
    """It is the first to come, and all the others are there before the living one. Without a journal that one is waited
    for as any other that is away, for ``recovery_s``: it may hold a newer version."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    round_of((a, b), 10)
    a.propose(15)
    table.restart(journal=journal)
    twin = twin_of(table, "a", there, "a", "b")
    twin.connect()
    b.connect()
    let_pass(table, away_s, b, twin)
    assert not table.coordinator.running
    assert "whether an earlier a still runs" in [x.text for x in twin.asked if isinstance(x, r.Notice)][-1]
    a.connect()
    let_pass(table, 8, a, b, twin)
    assert a.machine.welcomed and not twin.machine.welcomed
    assert (a.machine.incarnation, a.record.version) == (1, 2)
    assert a.machine.fragments[0].outstanding


def test_a_return_says_whether_another_process_has_resumed_and_what_the_former_reported_is_not_its_own() -> None:
    table, (a, b) = at_version_1("a", "b")
    b.say(m.Heartbeat("training", 8, 0.1, counts=m.Counts(8, 3)))
    there = [held(a), held(b)]
    b.cut()
    b.connect()
    b.cut()
    twin = twin_of(table, "b", there, "a", "b")
    twin.connect()
    twin.cut()
    cut, lost, again = table.events("lost")
    assert cut.data == lost.data and lost.data["counts"]["pending"] == 3 and not again.data
    assert [x.data for x in table.events("return")] == [{}, {"resumed": True}]


def test_who_comes_back_after_another_process_has_resumed_as_it_is_a_newcomer() -> None:
    """The other one has ended again; what it held is its incarnation's, and may have been granted to others since."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    a.cut()
    twin = twin_of(table, "a", there, "a", "b")
    twin.connect()
    let_pass(table, 1, b, twin)
    assert twin.machine.welcomed
    twin.cut()
    a.connect()
    assert "another process has come back as this replica" in a.pop(r.Reset).reason
    a.connect()
    let_pass(table, 1, a, b)
    assert (a.machine.welcomed, a.machine.incarnation) == (True, 2)


def test_two_processes_whose_incarnations_are_both_gone_do_not_end_a_coordinator_that_starts_up() -> None:
    """It has heard both before it hears from somebody else that they are gone."""
    table, (a, b) = at_version_1("a", "b")
    a.cut()
    later = Seat(table, "a", address="elsewhere")
    later.connect()
    let_pass(table, 4, b, later)
    assert later.machine.incarnation == 2
    later.say(m.Bye())
    b.take()
    assert b.machine.known.gone == {"a": 2}
    table.restart(journal=False)
    for seat in (a, later, b):
        seat.connect()
    let_pass(table, 1, b)
    assert table.coordinator.running and b.machine.welcomed
    assert {x.replica for x in table.events("refuse")} == {"a"}
    for seat in (later, a):
        assert "evicted" in seat.pop(r.Reset).reason


def test_who_is_in_doubt_while_the_job_starts_anew_is_told_that_its_counted_steps_are_gone() -> None:
    """All others have died, and nobody holds the state that has them."""
    table, (a, b) = at_version_1("a", "b")
    a.machine.fragments[0].doubt()
    a.cut()
    b.cut()
    table.restart(journal=False)
    b = Seat(table, "b")
    a.connect()
    b.connect()
    table.tick(31.0)
    let_pass(table, 3, a, b)
    assert table.coordinator.running
    a.fetch(b)
    assert "steps of this replica that were counted" in a.pop(r.Reset).reason


def test_who_left_on_a_signal_and_resumes_hears_that_its_incarnation_has_left_and_what_follows() -> None:
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    b.do(b.machine.say(m.Leaving()))
    b.say(m.Bye(early=True))
    twin = twin_of(table, "b", there, "a", "b")
    twin.connect()
    let_pass(table, 1, a, twin)
    assert twin.pop(r.Reset).reason == (
        "incarnation 1, which is in the checkpoint, has left the job since, or was evicted; it joins as the next "
        "incarnation"
    )


def test_who_comes_back_as_a_new_incarnation_trains_from_where_the_job_is() -> None:
    """It holds the checkpoint's version, and is let in before it is told of a newer one: it waits for that."""
    _table, (a, b) = at_version_1("a", "b")
    was = held(b)
    round_of((a, b), 10)
    second = b.die()
    second.connect()
    seat = second.die()
    seat.machine.resume(was)
    seat.connect()
    assert seat.asked and isinstance(seat.asked[-1], r.Reset) and seat.machine.incarnation == 0
    seat.open()
    told = []
    while seat.inbox:
        told.append(type(seat.inbox[0]))
        seat.do(seat.machine.receive(seat.inbox.pop(0)))  # type: ignore[arg-type]
        assert not (seat.machine.welcomed and seat.machine.may_train)
    assert m.Welcome in told and m.Behind in told
    seat.fetch(a)
    assert seat.record == a.record and seat.machine.may_train


@pytest.mark.parametrize("rounds", [0, 1])
def test_who_goes_on_from_a_checkpoint_trains_from_where_the_job_is(rounds: int) -> None:
    """Its incarnation is in the job yet. Behind tells it where that is, also if it holds just that; if its former
    process went on after the checkpoint, it trains once it is let in as a new incarnation."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    for _ in range(rounds):
        round_of((a, b), 10)
    b.cut()
    twin = twin_of(table, "b", there, "a", "b")
    twin.open()
    let_pass(table, 1, a)
    told = []
    while twin.inbox:
        assert not (twin.machine.welcomed and twin.machine.may_train)
        told.append(type(twin.inbox[0]))
        twin.do(twin.machine.receive(twin.inbox.pop(0)))  # type: ignore[arg-type]
    assert m.Welcome in told and m.Behind in told
    assert twin.machine.may_train == (rounds == 0)
    if rounds:
        twin.fetch(a)
        assert twin.pop(r.Reset).reason == COUNTED_ELSEWHERE
        assert "it goes on from the job's state, which contains them (usual after a kill" in COUNTED_ELSEWHERE
        twin.cut()
        assert not twin.machine.may_train
        twin.connect()
        let_pass(table, 1, a, twin)
        assert not twin.machine.may_train
        twin.fetch(a)
        assert twin.machine.may_train and twin.machine.incarnation == 2 and twin.record == a.record


def test_one_with_several_fragments_trains_once_each_is_where_the_job_is() -> None:
    """Whichever of them is fetched first, and what it is told first."""
    table = Table(fragments=2)
    a, b = table.start("a", "b")
    for fragment in (0, 1):
        commit([a, b], 5, fragment)
    old = Held("b", 1, b.machine.epoch, roster={"a": 1, "b": 1}, records=(b.held(0), b.held(1)))
    b.cut()
    for fragment in (0, 1):
        a.propose(10, fragment)
        let_pass(table, 3, a)
        a.reduce()
        a.take()
    again = Seat(table, "b", address="elsewhere")
    again.machine.resume(old)
    again.open()
    let_pass(table, 1, a)
    while again.inbox:
        again.do(again.machine.receive(again.inbox.pop(0)))  # type: ignore[arg-type]
        assert not again.machine.may_train
    again.fetch(a, 1)
    assert not again.machine.may_train
    again.fetch(a, 0)
    assert again.machine.may_train and (again.held(0), again.held(1)) == (a.held(0), a.held(1))


@pytest.mark.parametrize("what", ["its fetch fails", "the coordinator restarts", "let in anew, its fetch fails"])
def test_one_that_could_not_fetch_does_not_train_from_the_checkpoint(what: str) -> None:
    """Its former process may have taken the same steps on other data, and they are counted."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    if "anew" in what:
        b = b.die()
        b.connect()
        b.fetch(a)
    round_of((a, b), 10)
    b.cut()
    twin = twin_of(table, "b", there, "a", "b")
    twin.connect()
    if "anew" in what:
        assert isinstance(twin.asked[-1], r.Reset)
        twin.connect()
    let_pass(table, 1, a, twin)
    assert twin.machine.fragments[0].fetching and not twin.machine.may_train
    if "fails" in what:
        twin.do(twin.machine.fetch_failed(0))
    else:
        table.restart(journal=True)
        assert not twin.machine.may_train
        twin.open()
    assert not twin.machine.may_train


def test_one_that_is_reset_before_it_trains_restores_a_checkpoint_as_any_other_that_holds_nothing() -> None:
    """The others die before it has fetched: the job goes on from a newer checkpoint, and does not start anew."""
    table, (a, b) = at_version_1("a", "b")
    there = [held(a), held(b)]
    b = b.die()
    b.connect()
    b.fetch(a)
    round_of((a, b), 10)
    b.cut()
    twin = twin_of(table, "b", there, "a", "b")
    twin.machine.checkpoint = a.record.position
    twin.connect()
    assert isinstance(twin.asked[-1], r.Reset)
    twin.connect()
    let_pass(table, 1, a, twin)
    a.cut()
    twin.do(twin.machine.fetch_failed(0))
    let_pass(table, 610, twin)
    assert twin.conn is None
    twin.connect()
    let_pass(table, 40, twin)
    assert [x.version for x in table.events("restore")] == [2]
    assert twin.pop(r.RestoreCheckpoint)


def test_a_part_that_was_given_after_another_incarnation_was_gone_voids_the_part_of_that_one() -> None:
    """Its units were granted again by then: both would bring them into the model."""
    record = m.Record(0, 1, "chain", 3, counted=(("a", 1, 3), ("b", 1, 3)), done=((0, 3),))
    early = Held("a", 1, 5, used=((3, 6),), queue=((6, 8),), records=(record,))
    late = Held("b", 1, 5, gone={"a": 1}, used=((3, 4),), queue=((4, 6),), records=(record,))
    assert given_up([early, late]) == {("a", 1)}
    for present in (["a", "b"], ["b"]):
        back = returning([early, late], present, [record])
        assert back.incarnation_ids == {x: {"a": 2, "b": 1}[x] for x in present}
        assert (back.adopted_by, back.queues) == ({}, {"b": ((4, 6),)})
        assert back.gone == {"a": 1}
