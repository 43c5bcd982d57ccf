"""END: a job that has ended is not trained once more by who comes late."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.past import Past
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.coordinator.status import status
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.resumed import Held
from ftopt.watch.sentences import note_of
from tests.sync.protocol.table import Seat, Table


def round_of(*seats: Seat, last_step: int, fragment: int = 0) -> None:
    for seat in seats:
        seat.propose(last_step, fragment)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


def beat(seat: Seat, step: int, state: str = "training", *, step_s: float = 0.1) -> None:
    seat.say(m.Heartbeat(state, step, step_s))


def reach_end(seat: Seat, step: int, *, wait_s: float = 20.0, but: tuple[str, ...] = ()) -> None:
    seat.do(seat.machine.say(m.Leaving()))
    seat.do(seat.machine.say(m.AtEnd(step, wait_s, but)))


def ended(*seats: Seat) -> list[bool]:
    """Whether each has been told that it need not wait any longer."""
    for seat in seats:
        seat.take()
    return [any(isinstance(x, m.End) for x in seat.asked) for seat in seats]


def leave(seat: Seat, *, finished: bool) -> None:
    if finished:
        seat.say(m.Finished())
    seat.do(seat.machine.say(m.Leaving()))
    seat.say(m.Bye(early=not finished))


@pytest.mark.parametrize(("finished", "said"), [(True, "left"), (False, "left before its part of the job was done")])
def test_it_is_said_of_who_leaves_whether_its_part_of_the_job_was_done(finished: bool, said: str) -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    leave(a, finished=finished)
    (told,) = table.events("leave")
    note = note_of({"event": "leave", "replica": "a", "incarnation": 1, "data": dict(told.data)})
    assert note is not None and note.text == f"a {said}"


def test_no_round_waits_for_a_member_that_has_finished() -> None:
    """It proposes nothing any more, and may itself wait for the others' last round."""
    table = Table(start_replicas=2, grace_s=60.0)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    a.say(m.Finished())
    b.propose(20)
    assert [event.version for event in table.events("quorum")] == [1, 2]
    b.reduce()
    a.take()
    b.take()
    assert (a.record.version, b.record.version) == (1, 2) and a.pop(r.Fetch)


@pytest.mark.parametrize("journal", [None, "kept", "compacted"])
@pytest.mark.parametrize("finished", [True, False])
def test_who_was_killed_before_the_others_ended_does_not_begin_from_the_start(
    finished: bool, journal: str | None
) -> None:
    """It would train all of the job once more, alone. A job whose last replicas were stopped starts again."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    b.cut()
    leave(a, finished=finished)
    for _ in range(2 if journal == "compacted" else 1 if journal else 0):
        table.restart(journal=True)
        table.journal[:] = e.needed(e.replay(table.journal))
    b = b.die()
    b.open()
    if b.conn is None:  # its predecessor is evicted: it comes again
        b.open()
    table.tick(100.0)
    b.take()
    if finished:
        assert "the job has ended at version 1, inner step 10" in b.pop(m.Over).reason
    else:
        assert b.record.version == 0
    assert len(table.events("start")) == (1 if finished else 2)


@pytest.mark.parametrize("held", [0, 1, 2])
def test_who_was_cut_off_until_the_end_does_not_go_on_from_an_older_version(held: int) -> None:
    """As a process that was stopped: what it would make would replace the final checkpoint."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    for version in range(1, 4):
        if version == held + 1:
            b.cut()
        round_of(*((a, b) if version <= held else (a,)), last_step=10 * version)
    leave(a, finished=True)
    b.open()
    table.tick(100.0)
    b.take()
    told = [x.reason for x in b.asked if isinstance(x, r.GiveUp)]
    assert [x[:46] for x in told] == ["the job has ended at version 3, inner step 30,"]
    assert not table.events("recover") and not table.events("start")[1:]


@pytest.mark.parametrize("lacks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("journal", [False, True])
def test_who_was_cut_off_in_the_ends_last_round_of_a_fragment_is_told_of_the_end(
    journal: bool, lacks: tuple[int, ...]
) -> None:
    table = Table(fragments=2, start_replicas=2)
    a, b = table.start("a", "b")
    for fragment in sorted((0, 1), key=lacks.__contains__):
        if fragment == lacks[0]:
            b.cut()
        round_of(*((a,) if fragment in lacks else (a, b)), last_step=10, fragment=fragment)
    leave(a, finished=True)
    if journal:
        table.restart(journal=True)
    b.open()
    table.tick(100.0)
    b.take()
    assert [x.reason[:46] for x in b.asked if isinstance(x, r.GiveUp)] == [
        "the job has ended at version 1, inner step 10,"
    ]
    assert not table.events("recover")


def test_those_who_hold_a_last_version_of_each_fragment_together_go_on() -> None:
    table = Table(fragments=2, start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    round_of(a, b, c, last_step=10)
    round_of(a, b, c, last_step=10, fragment=1)
    b.cut()
    round_of(a, c, last_step=20)
    c.cut()
    b.open()
    b.fetch(a)
    b.cut()
    c.open()
    table.tick(1.0)
    c.take()
    leave(a, finished=True)
    b.open()
    table.tick(100.0)
    assert table.coordinator.running and not [x for x in (*b.asked, *c.asked) if isinstance(x, r.GiveUp)]


def test_who_has_not_heard_of_the_last_decision_goes_on_from_it() -> None:
    """It has prepared that version; the coordinator is started again."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    for seat in (a, b):
        seat.propose(10)
    for seat in (a, b):
        seat.reduce()
    b.cut()
    a.take()
    leave(a, finished=True)
    table.restart(journal=True)
    assert b.record.version == 0
    b.open()
    table.tick(100.0)
    b.take()
    assert table.coordinator.running and b.record.version == 1
    assert not [x for x in b.asked if isinstance(x, r.GiveUp)]


def test_who_was_cut_off_from_the_end_on_ends_with_its_version() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    b.cut()
    leave(a, finished=True)
    b.open()
    table.tick(100.0)
    b.take()
    assert table.coordinator.running and b.record.version == 1
    assert not [x for x in b.asked if isinstance(x, r.GiveUp)]


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize("first", ["a", "b"])
def test_who_wakes_at_an_older_version_does_not_keep_one_from_its_checkpoint_of_the_end(
    first: str, journal: bool, held: int
) -> None:
    """However long that takes to read it."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    for _ in range(held):
        round_of(a, b, last_step=5)
    b.cut()
    round_of(a, last_step=10)
    saved = a.record
    leave(a, finished=True)
    if journal:
        table.restart(journal=True)
    a = Seat(table, "a")
    a.machine.checkpoint = saved.position
    for seat in (a, b) if first == "a" else (b, a):
        seat.open()
    for _ in range(10):
        for seat in (a, b):
            if seat.conn is not None:
                seat.take()
        table.tick(10.0)
    assert a.pop(r.RestoreCheckpoint) and not [x for x in b.asked if isinstance(x, r.GiveUp)]
    a.machine.restore(Held("a", a.machine.incarnation, 0, records=(saved,)))
    a.open()
    a.take()
    b.take()
    b.fetch(a)
    assert a.record == b.record == saved
    round_of(a, b, last_step=20)
    assert table.version == 2 + held


@pytest.mark.parametrize("journal", [False, True])
def test_who_wakes_while_a_checkpoint_is_restored_without_it_does_not_undo_that(journal: bool) -> None:
    """Its pending steps may be in the checkpoint, as another's."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=5)
    b.cut()
    round_of(a, last_step=10)
    saved = a.record
    leave(a, finished=True)
    if journal:
        table.restart(journal=True)
    a = Seat(table, "a")
    a.machine.checkpoint = saved.position
    a.machine.resume(Held("a", 1, 0, records=(saved,)))
    a.connect()  # that incarnation has left
    a.open()
    table.tick(40.0)
    a.take()
    assert a.pop(r.RestoreCheckpoint)
    b.open()
    table.tick(40.0)
    b.take()
    a.machine.restore(Held("a", a.machine.incarnation, 0, gone={"b": 1}, records=(saved,)))
    a.open()
    a.take()
    b.take()
    assert b.pop(r.Reset)
    if b.conn is not None:
        b.cut()
    b.open()
    b.fetch(a)
    round_of(a, b, last_step=20)
    assert a.record == b.record and table.version == 3


def test_who_was_cut_off_at_version_0_is_not_told_of_an_end_while_another_may_still_train() -> None:
    """One is at its end, and the coordinator is started again."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    b.cut()
    round_of(a, c, last_step=10)
    leave(a, finished=True)
    c.cut()
    table.restart(journal=True)
    b.open()
    for _ in range(50):
        b.take()
        table.tick(1.0)
        b.say(m.Heartbeat("training", 8, 0.1))
    c.open()
    c.take()
    b.take()
    b.fetch(c)
    assert b.record == c.record and not [x for x in b.asked if isinstance(x, r.GiveUp)]


def test_who_was_cut_off_while_a_job_ended_at_version_0_keeps_its_steps() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    b.cut()
    leave(a, finished=True)
    b.open()
    table.tick(1.0)
    b.take()
    round_of(b, last_step=10)
    assert b.record.counted == (("b", 1, 10),)


@pytest.mark.parametrize("journal", [False, True])
def test_who_was_still_fetching_when_the_last_holder_ended_does_not_begin_from_the_start(journal: bool) -> None:
    """A replica at its end waits two seconds, and a large state takes longer."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    b.cut()
    b = b.die()
    b.open()
    leave(a, finished=True)
    a.cut()
    b.take()
    b.pop_fetch(0)
    b.do(b.machine.fetch_failed(0))
    if journal:
        table.restart(journal=True)
    b.open()
    table.tick(100.0)
    b.take()
    assert "the job has ended at version 1, inner step 10" in b.pop(m.Over).reason
    assert len(table.events("start")) == 1
    c = Seat(table, "c")
    c.open()  # b is not waited for
    c.take()
    assert "the job has ended" in c.pop(r.GiveUp).reason


@pytest.mark.parametrize("journal", [False, True])
def test_a_newcomer_to_a_job_that_has_ended_does_not_wait_for_one_that_is_dead(journal: bool) -> None:
    """It is refused as if all had left; so is the dead one, if its machine still runs."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    round_of(a, b, c, last_step=10)
    c.cut()
    round_of(a, b, last_step=20)
    for seat in (a, b):
        leave(seat, finished=True)
    if journal:
        table.restart(journal=True)
    a = a.die()
    a.open()
    if a.conn is None:
        a.open()
    table.tick(60.0)
    a.take()
    assert "the job has ended" in a.pop(m.Over).reason
    for _ in range(3):
        if c.conn is None:
            c.open()
        table.tick(60.0)
        c.take()
    assert not table.coordinator.running and c.record.version == 1
    assert "the job has ended" in c.pop(r.GiveUp).reason


def test_a_job_has_not_ended_while_one_that_came_later_trains() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    leave(a, finished=True)
    c = Seat(table, "c")
    c.open()
    c.fetch(b)
    leave(b, finished=False)
    leave(c, finished=False)
    for journal in (False, True):
        if journal:
            table.restart(journal=True)
        d = Seat(table, "d")
        d.open()
        table.tick(100.0)
        d.take()
        assert d.record.version == 0
        leave(d, finished=False)


def test_a_checkpoint_of_a_job_that_has_ended_is_restored() -> None:
    table = Table(start_replicas=1)
    (a,) = table.start("a")
    round_of(a, last_step=10)
    saved = a.record
    leave(a, finished=True)
    a = Seat(table, "a")
    a.machine.checkpoint = saved.position
    a.open()
    a.take()
    assert a.pop(r.RestoreCheckpoint)


def test_a_job_that_has_ended_does_not_go_back_to_an_older_checkpoint() -> None:
    """One that left early is started once more, as it was, when the others have trained to the end."""
    table = Table(start_replicas=1, start_s=10.0)
    (a,) = table.start("a")
    round_of(a, last_step=10)
    saved = a.record
    round_of(a, last_step=20)
    leave(a, finished=True)
    b = Seat(table, "b")
    b.machine.checkpoint = saved.position
    b.open()
    b.take()
    table.tick(11.0)
    b.take()
    assert not [x for x in b.asked if isinstance(x, r.RestoreCheckpoint)]
    assert "the job has ended at version 2, inner step 20, and its replicas" in b.pop(r.GiveUp).reason


@pytest.mark.parametrize("resumed", [True, False])
def test_a_newcomer_to_a_job_that_has_ended_waits_for_one_that_has_its_checkpoint(resumed: bool) -> None:
    """They are started at the same time; the newcomer, who has nothing to read, is often the first."""
    table = Table(start_replicas=2)
    (a, b) = table.start("a", "b")
    round_of(a, b, last_step=10)
    saved = a.record
    for seat in (a, b):
        leave(seat, finished=True)
    a, b = Seat(table, "a"), Seat(table, "b")
    a.machine.checkpoint = saved.position
    b.open()
    b.take()
    assert b.pop(r.Notice).text == (
        "the job has ended at version 1, inner step 10; waiting 9 s at most for a replica that resumes a checkpoint of "
        "it"
    )
    table.tick(8.0)
    if resumed:
        a.open()
        a.take()
        assert a.pop(r.RestoreCheckpoint)
    table.tick(2.0)
    assert (b.conn is not None) == resumed


def test_of_a_job_that_has_ended_the_status_says_so_before_and_after_one_that_comes_late() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    b.cut()
    table.tick(5.0)
    round_of(a, last_step=20)
    leave(a, finished=True)
    ended = "the job has ended at version 2, inner step 20: no replica is connected"
    table.tick(1.0)
    assert status(table.coordinator, table.now)["phase"] == ended
    late = Seat(table, "c")
    late.open()
    table.tick(30.0)
    assert late.conn is None
    assert status(table.coordinator, table.now)["phase"] == ended
    assert [x.data["connected"] for x in table.events("rollback")] == [0]


def test_who_ends_first_waits_for_one_that_is_near_and_goes_with_its_version() -> None:
    """The one is called in with 11 steps, jumps from 286 to 301, and has one step left, which is a version of its
    own."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=300)
    beat(b, 286)
    reach_end(a, 300)
    table.wait(1.0)
    assert ended(a) == [False]
    beat(b, 301)  # its loop has just ended
    table.wait(1.0)
    assert ended(a) == [False]
    b.do(b.machine.say(m.Leaving()))
    round_of(b, last_step=301)
    reach_end(b, 301)
    assert ended(a, b) == [False, False]  # one has not fetched the last version yet
    a.fetch(b)
    assert ended(a, b) == [True, True]
    ends = [seat.pop(m.End) for seat in (a, b)]
    assert ends[0] == ends[1] == m.End((b.record.position,), ("a", "b"))
    assert a.record.version == 2
    assert table.events("final")[-1].data == {"replicas": ["a", "b"], "identical": True, "awaited": []}


def test_who_ends_waits_for_one_that_joins() -> None:
    """It begins where the job is, and so its loop ends at once; else it would train on alone, with all steps before."""
    table = Table(start_replicas=1)
    (a,) = table.start("a")
    round_of(a, last_step=300)
    c = Seat(table, "c")
    c.open()
    reach_end(a, 300)
    table.wait(1.0)
    assert ended(a) == [False]
    c.fetch(a)
    reach_end(c, 300)
    assert ended(a, c) == [True, True]


@pytest.mark.parametrize("far", ["behind", "beyond", "apart", "lost"])
def test_who_ends_does_not_wait_for_one_that_does_not_end_with_it(far: str) -> None:
    """Its steps take longer than a round's patience; it trains on; its loop is on the same thread; it is dead."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=300)
    beat(b, 100 if far == "behind" else 299)
    reach_end(a, 300, but=("b",) if far == "apart" else ())
    if far == "beyond":
        beat(b, 301)
        table.wait(1.0)
        assert ended(a) == [False]
        beat(b, 302)
    elif far == "lost":
        b.cut()
        table.tick(1.0)
        assert ended(a) == [False]
        table.tick(2.0)
    table.wait(1.0)
    assert ended(a) == [True]
    assert a.pop(m.End).awaited == ()


def test_who_waits_for_one_that_hangs_goes_after_a_while_and_is_told() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=300)
    beat(b, 299)
    reach_end(a, 300)
    for _ in range(5):
        table.wait(1.0)
        beat(b, 299)
        beat(a, 300, "leaving")
    assert ended(a) == [True]
    assert "its loop has ended; it waits for b (inner step 299)" in a.pop(r.Notice).text
    assert a.pop(m.End).awaited == ("b",)
    reach_end(b, 300)
    assert ended(b) == [True]
    assert b.pop(m.End) == m.End((b.record.position,), ("a", "b"))


def test_who_was_let_go_is_sent_no_version_that_comes_before_it_has_left() -> None:
    """Of several that end together one would fetch it in time, and another one would not."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=300)
    reach_end(a, 300, but=("b",))
    assert ended(a) == [True]
    round_of(b, last_step=310)
    a.take()
    assert (a.record.version, b.record.version) == (1, 2)
    assert not any(isinstance(x, r.Fetch) for x in a.asked)


def test_who_ends_later_with_another_version_is_told() -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=300)
    reach_end(a, 300, but=("b",))
    assert ended(a) == [True]
    a.say(m.Bye())
    round_of(b, last_step=310)
    reach_end(b, 310)
    assert ended(b) == [True]
    assert b.pop(m.End) == m.End((b.record.position,), ("b",), ("a",))


@pytest.mark.parametrize("journal", [False, True])
def test_who_waits_for_the_end_goes_on_waiting_on_another_connection(journal: bool) -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=300)
    reach_end(a, 300)
    if journal:
        table.restart(journal=True)
        a.open()
        b.open()
        a.take()
        b.take()
    else:
        a.cut()
        a.connect()
    assert ended(a) == [False]
    reach_end(b, 300)
    assert ended(a, b) == [True, True]


@pytest.mark.parametrize("who", ["a replica of the job", "with another rate", "a stranger", "another model"])
def test_after_the_end_a_replica_of_the_job_is_sent_home_and_a_new_job_is_refused(who: str) -> None:
    """A supervisor has started the one again; the other is a mistake that its user must hear of."""
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    for seat in (a, b):
        leave(seat, finished=True)
    late = Seat(table, "z" if who == "a stranger" else "a")
    if who == "another model":
        object.__setattr__(late.machine.identity, "lines", {"model": "another"})
    elif who == "with another rate":
        lines = late.machine.identity.lines | {"own learning rate": "2"}
        object.__setattr__(late.machine.identity, "lines", lines)
    late.open()
    table.tick(30.0)
    late.take()
    kind = m.Over if who in ("a replica of the job", "with another rate") else r.GiveUp
    assert "the job has ended at version 1, inner step 10" in late.pop(kind).reason
    assert late.conn is None


@pytest.mark.parametrize("memory", ["lives", "journal", "written anew"])
@pytest.mark.parametrize("more", [1, 2])
def test_a_job_in_which_others_have_trained_on_has_not_ended(more: int, memory: str) -> None:
    """One whose loop was shorter has left; the others train on, and all of them are killed."""
    goes_on = more > 1 or memory == "lives"  # it lets the newcomers in before it knows that no state is left
    table = Table(start_replicas=2)
    a, b, c = table.start("a", "b", "c")
    round_of(a, b, c, last_step=10)
    leave(c, finished=True)
    for number in range(more):
        round_of(a, b, last_step=20 + 10 * number)
    a, b = a.die(), b.die()
    table.tick(700.0)
    if memory != "lives":
        if memory == "written anew":
            table.journal = e.needed(e.replay(table.journal))
        table.restart(journal=True)
    for _ in range(12):  # the job goes back to its startup phase when their predecessors are evicted: they come again
        for seat in (a, b):
            if seat.conn is None and not any(isinstance(x, m.Over | r.GiveUp) for x in seat.asked):
                seat.open()
        table.tick(5.0)
        a.take()
        b.take()
    assert len(table.events("start")) == 1 + goes_on
    told = [x.reason for seat in (a, b) for x in seat.asked if isinstance(x, m.Over | r.GiveUp)]
    assert goes_on or all("the job has ended at version 2" in x for x in told), told


@pytest.mark.parametrize("offers", [False, True])
def test_who_has_offered_steps_while_its_end_was_on_the_way_knows_that_a_later_version_may_have_them(
    offers: bool,
) -> None:
    table = Table(start_replicas=2)
    a, b = table.start("a", "b")
    round_of(a, b, last_step=10)
    for seat in (a, b):
        reach_end(seat, 10)
    table.tick(1.0)
    if offers:
        a.propose(12)
    a.take()
    (end,) = [x for x in a.asked if isinstance(x, m.End)]
    assert end.whole == (not offers)


def test_who_comes_too_late_is_told_what_happened_what_is_kept_and_what_to_do() -> None:
    said = Past([]).has_ended()
    assert "came too late" in said and "in what they have saved" in said and "resume it" in said
    assert "journal" not in said and "coordinator" not in said
