"""A coordinator that starts up: whom it waits for, and two processes of one id."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.status import status
from ftopt.sync.protocol.replica import effects as r
from ftopt.watch.status import line
from tests.sync.protocol.table import Seat, Table


def trained(table: Table, *names: str, rounds: int = 3) -> list[Seat]:
    """A job of these replicas, some versions on."""
    seats = table.start(*names)
    for version in range(1, rounds + 1):
        for seat in seats:
            seat.propose(5 * version)
        for seat in seats:
            seat.reduce()
        for seat in seats:
            seat.take()
    return seats


def let_pass(table: Table, seconds: int, *seats: Seat) -> None:
    """Time passes, and all that arrives is taken in."""
    for _ in range(seconds):
        table.tick(1.0)
        for seat in seats:
            seat.take()


def held(seat: Seat) -> list[str]:
    """What the seat's user has read of what it waits for."""
    return [x.text for x in seat.asked if isinstance(x, r.Notice)]


def test_a_coordinator_tells_the_decisions_that_it_finds_in_its_journal() -> None:
    """The one before may have been killed when it had journalled the last one and told nobody."""
    table = Table()
    seats = trained(table, "a", "b")
    table.restart(journal=True)
    for seat in seats:
        seat.connect()
    (recover,), decide = table.events("recover"), table.events("decide")[-1]
    (told,) = recover.data["decided"]
    assert told.pop("fragment") == decide.fragment
    assert told.pop("version") == decide.version == 3
    assert told.items() <= decide.data.items()


def test_a_coordinator_tells_no_policy_that_no_replica_has_given_it() -> None:
    """The journal has none; a launch would take the default for the job's."""
    table = Table()
    seats = trained(table, "a", "b")
    assert status(table.coordinator, table.now)["evict_after_s"] == table.coordinator.policy.evict_after_s
    table.restart(journal=True)
    assert "evict_after_s" not in status(table.coordinator, table.now)
    seats[0].connect()
    assert "evict_after_s" in status(table.coordinator, table.now)


def test_a_known_replica_that_waits_for_the_job_to_go_on_is_connected() -> None:
    table = Table()
    seats = trained(table, "a", "b", "c")
    table.restart(journal=True)
    for seat in seats[:2]:
        seat.connect()
    shown = status(table.coordinator, table.now)
    assert [x["state"] for x in shown["replicas"]] == ["connected", "connected", "away"]
    assert line(shown).endswith("; 2 of 3 replicas connected")


@pytest.mark.parametrize("start_replicas", [1, 2])
def test_newcomers_do_not_start_a_job_anew_that_living_replicas_hold(start_replicas: int) -> None:
    """COLD: four train; the coordinator comes back without memory, and newcomers are there before they are."""
    table = Table(start_replicas=start_replicas)
    seats = trained(table, "a", "b", "c", "d")
    table.restart(journal=False)
    newcomers = [Seat(table, name) for name in ("e", "f", "g")]
    for seat in newcomers:
        seat.connect()
    table.tick(5.0)
    for seat in newcomers:
        seat.take()
        assert seat.machine.fragments[0].record is None, "the job is not begun anew"
        assert "replicas that may run it already" in held(seat)[-1]
    for seat in seats:
        seat.connect()
    assert table.version == 3
    assert not table.events("gone")
    assert [seat.machine.incarnation for seat in seats] == [1, 1, 1, 1]


def test_without_a_journal_newcomers_alone_begin_after_recovery_s() -> None:
    """I4: nobody lives who holds anything; the time runs from when the coordinator could be reached."""
    table = Table(start_replicas=1)
    trained(table, "a", "b")
    for seat in list(table.seats_by_conn.values()):
        seat.cut()
    table.restart(journal=False)
    table.tick(20.0)
    newcomer = Seat(table, "e")
    newcomer.connect()
    table.tick(9.0)
    newcomer.take()
    assert newcomer.machine.fragments[0].record is None
    table.tick(2.0)
    newcomer.take()
    assert newcomer.record.version == 0


def test_a_new_job_starts_as_soon_as_its_replicas_are_there() -> None:
    table = Table()
    a, b = Seat(table, "a"), Seat(table, "b")
    a.connect()
    b.connect()
    a.take()
    assert (a.record.version, b.machine.welcomed) == (0, True)


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("newcomer_first", [True, False])
def test_a_living_replica_is_not_superseded_when_the_coordinator_restarts(journal: bool, newcomer_first: bool) -> None:
    """STICKY: the living replica is heard; the second process of its id waits, and is refused."""
    table = Table()
    a, b = trained(table, "a", "b")
    a.propose(20)
    table.restart(journal=journal)
    second = Seat(table, "a", address="elsewhere")
    if newcomer_first:
        second.connect()
        table.tick(1.0)
    a.connect()
    if not newcomer_first:
        second.connect()
    second.take()
    assert any("connected as a" in text for text in held(second))
    b.connect()
    let_pass(table, 4, a, b, second)
    assert a.machine.welcomed
    assert (a.machine.incarnation, a.record.version) == (1, 3)
    assert a.machine.fragments[0].outstanding, "its pending steps are still on offer"
    assert not table.events("gone")
    assert "end the other process" in second.pop(r.GiveUp).reason


@pytest.mark.parametrize("journal", [True, False])
def test_the_successor_of_a_dead_replica_takes_its_place_while_the_coordinator_starts_up(journal: bool) -> None:
    """Nobody is heard as `a` for dead_after_s: who comes under its id is let in."""
    table = Table()
    a, b = trained(table, "a", "b")
    a.cut()
    table.restart(journal=journal)
    b.connect()
    successor = Seat(table, "a", address="elsewhere")
    successor.connect()
    table.tick(4.0)
    successor.take()
    assert (successor.machine.welcomed, successor.machine.incarnation) == (True, 2)
    assert [e.data["reason"] for e in table.events("gone")] == ["superseded by a newcomer"]


def test_a_living_replica_that_comes_back_within_dead_after_s_keeps_its_place() -> None:
    """STICKY: its link broke at the moment when a second process of its id was waiting."""
    table = Table()
    a, _ = trained(table, "a", "b")
    second = Seat(table, "a", address="elsewhere")
    second.connect()
    a.cut()
    table.wait(1.0)
    a.connect()
    table.tick(4.0)
    second.take()
    assert (a.machine.welcomed, a.machine.incarnation) == (True, 1)
    assert second.pop(r.GiveUp)


def test_who_waits_for_an_id_gets_it_when_its_holder_stays_away() -> None:
    table = Table()
    a, _ = trained(table, "a", "b")
    second = Seat(table, "a", address="elsewhere")
    second.connect()
    a.cut()
    while not second.machine.welcomed and table.now < 120.0:
        table.now = table.coordinator.deadline_s()
        table.do(table.coordinator.tick(table.now))
        second.take()
        for seat in list(table.seats_by_conn.values()):
            if seat.machine.welcomed:
                seat.say(m.Heartbeat("training", 1, 0.1))
    assert (second.machine.welcomed, second.machine.incarnation) == (True, 2)
    assert table.now <= 103.1


def test_the_successor_of_one_that_leaves_waits_until_it_has_left() -> None:
    """A supervisor starts it while the leaver hands over its last steps, which takes longer than dead_after_s."""
    table = Table()
    a, b = trained(table, "a", "b")
    a.do(a.machine.say(m.Leaving()))
    successor = Seat(table, "a", address="elsewhere")
    successor.connect()
    let_pass(table, 20, a, b, successor)
    assert not [x for x in successor.asked if isinstance(x, r.GiveUp)]
    a.say(m.Bye())
    successor.take()
    assert (successor.machine.welcomed, successor.machine.incarnation) == (True, 2)
    assert [e.data["reason"] for e in table.events("gone")] == ["left"]


@pytest.mark.parametrize("journal", [True, False])
def test_two_newcomers_of_one_id_do_not_throw_each_other_out(journal: bool) -> None:
    """While the job is not complete, the first one stays, the second one waits and says why; then it is refused."""
    table = Table()
    table.restart(journal=journal)
    one, other, b = Seat(table, "a"), Seat(table, "a", address="elsewhere"), Seat(table, "b")
    one.connect()
    other.connect()
    assert one.conn is not None
    assert other.conn is not None
    assert any("connected as a" in text for text in held(other))
    b.connect()
    let_pass(table, 40, one, other, b)
    assert one.machine.welcomed
    assert b.machine.welcomed
    assert "replica ids must be unique" in other.pop(r.GiveUp).reason


def test_when_one_of_two_newcomers_of_one_id_goes_the_other_is_taken() -> None:
    table = Table()
    one, other, b = Seat(table, "a"), Seat(table, "a", address="elsewhere"), Seat(table, "b")
    one.connect()
    other.connect()
    one.cut()
    b.connect()
    other.take()
    b.take()
    assert other.machine.welcomed
    assert b.machine.welcomed


def test_a_process_that_comes_again_takes_the_place_of_its_own_broken_connection() -> None:
    """Its link broke without the coordinator's knowledge: it is one process, as its address says."""
    table = Table()
    a, b = Seat(table, "a"), Seat(table, "b")
    a.open()
    a.conn = None
    a.do(a.machine.disconnect())
    a.connect()
    b.connect()
    a.take()
    assert a.machine.welcomed
    assert b.machine.welcomed


def test_who_was_given_up_tells_a_coordinator_that_has_forgotten_it() -> None:
    """FENCE: its steps are counted from 1 again, and a state may count those of its former incarnation."""
    table = Table(start_replicas=1)
    (a,) = trained(table, "a")
    table.do(table.coordinator.members.gone(("a", 1), "evicted"))
    a.take()
    table.restart(journal=False)
    a.connect()
    let_pass(table, 40, a)
    assert (a.machine.welcomed, a.machine.incarnation) == (True, 2)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_coordinator_without_memory_hears_of_a_superseded_incarnation_as_gone_before(first: str) -> None:
    """It was told when it happened: living replicas are not evicted."""
    table = Table()
    a, b = trained(table, "a", "b")
    again = b.die()
    again.connect()
    let_pass(table, 2, a, again)
    again.fetch(a)
    let_pass(table, 1, a, again)
    assert [x.data["reason"] for x in table.events("gone")] == ["superseded by a newcomer"]
    table.restart(journal=False)
    for seat in sorted((a, again), key=lambda seat: seat is (a if first == "b" else again)):
        seat.connect()
    let_pass(table, 2, a, again)
    assert [(x.replica, x.incarnation) for x in table.events("gone")[-1:]] == [("b", 1)]
    by = "a" if first == "a" else "its next incarnation"
    assert table.events("gone")[-1].data["reason"] == f"reported by {by}, gone before"


OF_ANOTHER_START = m.Position(0, 90, m.first_chain(0, 1, "z", "another"))
"""Of a checkpoint that a job of an earlier start has left in the folder: the job cannot go on from it."""


@pytest.mark.parametrize("checkpoint", ["none", "of another start"])
def test_the_silent_holder_of_a_version_is_awaited_and_not_superseded_by_its_twin(checkpoint: str) -> None:
    """B is killed; A stands still, as in a frozen machine, and a supervisor starts another A."""
    table = Table()
    a, b = trained(table, "a", "b")
    b.cut()
    a.frozen = True
    let_pass(table, 4)
    assert a.conn is None and table.events("lost")
    twin = Seat(table, "a", address="elsewhere")
    if checkpoint == "of another start":
        twin.machine.checkpoint = OF_ANOTHER_START
    twin.connect()
    let_pass(table, 14, twin)
    assert not twin.machine.welcomed and any("alone holds the newest version" in text for text in held(twin))
    a.frozen = False
    a.connect()
    let_pass(table, 5, a, twin)
    assert a.machine.incarnation == 1 and a.record.version == 3 and table.version == 3
    assert any("another id" in x.reason for x in twin.asked if isinstance(x, r.GiveUp))
    assert not table.events("rollback")


def test_a_newcomer_that_fetches_from_the_silent_holder_has_nothing_yet_and_the_twin_waits() -> None:
    table = Table()
    a, b = trained(table, "a", "b")
    b.cut()
    a.frozen = True
    c, twin = Seat(table, "c"), Seat(table, "a", address="elsewhere")
    for seat in (c, twin):
        seat.connect()
    let_pass(table, 5, c, twin)
    (fetch,) = [x for x in c.asked if isinstance(x, r.Fetch)]
    assert fetch.sources == ("a",), "it was let in while A seemed to live"
    assert a.conn is None and not twin.machine.welcomed
    a.frozen = False
    a.connect()
    let_pass(table, 5, a, c, twin)
    c.fetch(a)
    assert c.record.version == a.record.version == table.version == 3
    assert not table.events("rollback") and "a" not in [x.replica for x in table.events("gone")]


def test_the_silent_holder_of_a_version_is_superseded_after_gone_after_s() -> None:
    table = Table(evict_after_s=60.0)
    a, b = trained(table, "a", "b")
    b.cut()
    a.frozen = True
    let_pass(table, 4)
    twin = Seat(table, "a", address="elsewhere")
    twin.connect()
    let_pass(table, 50, twin)
    assert not twin.machine.welcomed
    assert not table.events("gone")
    let_pass(table, 12, twin)
    assert table.events("gone") and table.events("rollback")


@pytest.mark.parametrize(
    "how", ["it has hung up", "another one holds it", "a checkpoint has it", "it is known to be dead"]
)
def test_where_nothing_is_lost_with_it_the_twin_comes_in_at_once(how: str) -> None:
    table = Table()
    a, b = trained(table, "a", "b")
    if how != "another one holds it":
        b.cut()
    if how == "it has hung up":
        a.cut()
    a.frozen = True
    let_pass(table, 4, *([b] if b.conn is not None else []))
    twin = Seat(table, "a", address="elsewhere")
    if how == "it is known to be dead":
        twin.machine.identity = replace(twin.machine.identity, replaces=True)
    if how == "a checkpoint has it":
        twin.machine.checkpoint = a.record.position
    twin.connect()
    let_pass(table, 3, twin)
    assert table.events("gone"), "it is superseded"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_checkpoint_of_the_newest_version_of_fragment_0_may_lack_that_of_another(*, restarts: bool) -> None:
    """A alone has made the newest version of fragment 1, and stands still; its twin could restore fragment 0's."""
    table = Table(fragments=2, evict_after_s=60.0)
    a, b = table.start("a", "b")
    for fragment, last_step in ((0, 5), (1, 5), (0, 10)):
        for seat in (a, b):
            seat.propose(last_step, fragment)
        for seat in (a, b):
            seat.reduce()
        for seat in (a, b):
            seat.take()
    b.cut()
    a.propose(10, 1)
    a.reduce()
    a.take()
    assert a.held(0).version == a.held(1).version == 2
    a.frozen = True
    let_pass(table, 4)
    if restarts:
        again = b.die()
        again.connect()
        let_pass(table, 1, again)
    twin = Seat(table, "a", address="elsewhere")
    twin.machine.checkpoint = a.held(0).position
    twin.connect()
    let_pass(table, 10, twin)
    assert not twin.machine.welcomed and any("alone holds the newest version" in text for text in held(twin))
    a.frozen = False
    a.connect()
    let_pass(table, 5, a, twin)
    assert a.machine.incarnation == 1 and a.held(1).version == 2 and not table.events("rollback")


def rolled_back() -> tuple[Table, Seat]:
    """B alone has made version 4, dies and comes back empty: the job goes back, while A, which holds version 3 and has
    said that it lacks the newest, stands still."""
    table = Table(evict_after_s=60.0)
    a, b = trained(table, "a", "b")
    b.propose(20)
    table.tick(3.0)
    b.reduce()
    b.take()
    a.take()
    a.do(a.machine.fetch_failed(0))
    a.frozen = True
    again = b.die()
    again.connect()
    let_pass(table, 1, again)
    assert table.events("rollback") and table.version == 4
    if again.conn is None:
        again.connect()
    return table, a


@pytest.mark.parametrize("checkpoint", ["none", "of another start"])
def test_after_a_rollback_the_silent_holder_of_what_is_left_is_awaited(checkpoint: str) -> None:
    table, a = rolled_back()
    twin = Seat(table, "a", address="elsewhere")
    if checkpoint == "of another start":
        twin.machine.checkpoint = OF_ANOTHER_START
    twin.connect()
    let_pass(table, 20, twin)
    assert not twin.machine.welcomed and any("alone holds the newest version" in text for text in held(twin))
    a.frozen = False
    if a.conn is None:
        a.connect()
    let_pass(table, 5, a, twin)
    assert a.machine.welcomed and a.machine.incarnation == 1 and a.record.version == table.version == 3


@pytest.mark.parametrize("how", ["dead for evict_after_s", "it has hung up", "it is known to be dead"])
def test_after_a_rollback_a_holder_that_is_dead_keeps_nobody_for_ever(how: str) -> None:
    table, a = rolled_back()
    if how == "it has hung up":
        a.frozen = False
        a.connect()
        a.cut()
    twin = Seat(table, "a", address="elsewhere")
    if how == "it is known to be dead":
        twin.machine.identity = replace(twin.machine.identity, replaces=True)
    twin.connect()
    let_pass(table, 70 if how == "dead for evict_after_s" else 45, twin)
    assert twin.machine.welcomed


def test_who_fetches_version_0_at_the_start_is_no_late_joiner() -> None:
    """It begins later than the first replica, which has taken its steps by then: it is not called in for that."""
    table = Table(start_replicas=2)
    a, b = (Seat(table, name, initial=name) for name in "ab")
    for seat in (a, b):
        seat.open()
    for seat in (a, b):
        seat.take()
    b.fetch(a)
    a.propose(10)
    table.tick(1.0)
    c = Seat(table, "c", initial="c")
    c.open()
    c.take()
    c.fetch(a)
    table.tick(0.1)
    assert [x.replica for x in table.events("call_in")] == ["c"], "it has joined a round under way"
    table.tick(2.0)  # the grace is over
    assert [x.replica for x in table.events("call_in")] == ["c", "b"]
