"""The scenarios that broke a model of the protocol, played by hand with the real machines."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table


def test_1_a_replica_that_was_counted_while_away_does_not_count_its_steps_again() -> None:
    """COUNT: A and B prepare, A's link drops, the commit includes A; A comes back."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce()
    a.cut()
    b.reduce()
    assert table.version == 1
    b.take()
    assert b.record.counted == (("a", 1, 5), ("b", 1, 5))
    # A learns the decision from the attempt that it had prepared, and needs no fetch.
    a.connect()
    assert a.record == b.record
    assert a.machine.counted_step(a.record) == 5
    assert not a.machine.fragments[0].outstanding


def test_1_also_when_the_job_has_moved_on_and_it_must_fetch() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce()
    a.cut()
    b.reduce()
    b.take()
    b.propose(10)
    b.reduce()
    b.take()
    assert table.version == 2
    a.open()
    assert a.machine.fragments[0].contribution is not None  # FREEZE: until it knows
    a.fetch(b)
    assert a.machine.counted_step(a.record) == 5
    assert not a.machine.fragments[0].outstanding


def test_2_an_outstanding_contribution_is_frozen_through_disconnects_and_aborts() -> None:
    """FREEZE: whatever happens, the one that was offered is the one that counts."""
    table = Table()
    a, b = table.start("a", "b")
    offered = a.propose(5)
    a.cut()
    a.propose(8)  # the trainer went on; this one is dropped
    assert a.machine.fragments[0].contribution == offered
    a.connect()
    b.propose(5)
    start = a.reduce()
    assert start.contribution == offered
    b.take()
    b.do(b.machine.reduce_failed(0, start.quorum.attempt, reason="cable", peer=""))
    a.take()
    assert table.events("abort")
    assert a.machine.fragments[0].contribution == offered
    table.tick(1.0)
    assert a.reduce().contribution == offered
    b.reduce()
    a.take()
    assert a.machine.counted_step(a.record) == 5


def test_3_a_coordinator_with_its_journal_does_not_decide_a_version_twice() -> None:
    """JOURNAL: A has applied v1, B has not heard of it; the coordinator dies; B is back first."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    assert (a.record.version, b.record.version) == (1, 0)
    table.restart(journal=True)
    b.connect()
    table.tick(4.0)  # A is not here: the journal says enough
    b.take()
    assert b.record == a.record


def test_3_a_coordinator_without_memory_waits_for_whom_it_hears_of() -> None:
    """WAIT: the same, and the journal is lost."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    table.restart(journal=False)
    b.open()
    table.tick(29.0)
    assert not table.coordinator.running
    a.open()
    assert table.coordinator.running
    assert table.version == 1
    a.take()
    b.fetch(a)
    assert b.record == a.record
    assert b.machine.counted_step(b.record) == 5


def test_3_who_comes_too_late_is_told_of_the_fork_and_starts_anew() -> None:
    """CHAIN: recovery_s has passed without A; it holds a v1 of another branch."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    table.restart(journal=False)
    b.open()
    table.tick(31.0)
    b.reduce("another sum")
    b.take()
    assert b.record.version == a.record.version == 1
    a.open()
    a.take()
    assert table.events("fork")
    assert a.pop(r.Reset)
    a.connect()
    a.fetch(b)
    assert a.record == b.record
    assert a.machine.incarnation == 2


def test_4_a_newcomer_does_not_impose_its_state_on_a_recovering_job() -> None:
    """COLD: it reaches a restarted coordinator before the state holders."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    b.take()
    for journal in (True, False):
        table.restart(journal=journal)
        c = Seat(table, "c", "random")
        c.open()
        table.tick(2.0)
        assert not table.coordinator.running
        a.open()
        b.open()
        assert table.coordinator.running
        a.take()
        c.fetch(a)
        assert c.record == a.record
        assert c.record.version == 1
        c.say(m.Bye())
        a.take()


def test_6_a_commit_needs_no_peer() -> None:
    """All that applying needs is held before a member prepares: the other one dies between commit and apply."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.die()
    b.take()
    adopt = b.pop(r.CommitPrepared)
    assert adopt.record == b.record
    assert b.record.version == 1
    assert not [x for x in b.asked if isinstance(x, r.Fetch)]


def test_7_the_job_goes_on_from_what_is_left_when_the_last_holder_is_gone() -> None:
    """ROLLBACK: the only holder of v1 dies for good."""
    table = Table(evict_after_s=20.0)
    a, b, c = table.start("a", "b", "c")
    a.propose(5)
    table.tick(3.0)  # the grace passes; B and C hang
    a.reduce()
    a.take()
    assert a.record.version == 1
    a.cut()
    for seat in (b, c):
        seat.take()
        assert seat.pop(r.Fetch).position.version == 1
        seat.do(seat.machine.fetch_failed(0))  # A is dead
        assert seat.record.version == 0
    table.tick(19.0)
    assert table.version == 1  # A may come back
    table.tick(2.0)
    assert table.events("rollback")
    b.open()
    c.open()
    table.tick(1.0)
    b.take()
    c.take()
    assert (table.version, b.record.version) == (0, 0)
    b.propose(7)
    c.propose(7)
    b.reduce()
    c.reduce()
    b.take()
    assert b.record.version == 1
    a.connect()  # gone is irrevocable
    assert a.pop(r.Reset)


def test_10_a_commit_names_its_digest_and_who_holds_another_one_fetches() -> None:
    """A has prepared a corrupted result and is cut off; the others' digest is decided later."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    a.reduce("corrupted")
    a.cut()
    b.reduce()
    c.reduce()
    assert table.events("mismatch")
    assert table.version == 0
    b.reduce()  # the survivors' retry
    c.reduce()
    b.take()
    assert table.version == 1
    assert b.record.counted == (("b", 1, 5), ("c", 1, 5))
    a.open()
    a.fetch(b)
    assert a.record == b.record
    assert a.machine.counted_step(a.record) == 0  # its steps are still pending


def test_11_of_two_processes_with_one_id_the_living_one_stays() -> None:
    table = Table()
    a, b = table.start("a", "b")
    impostor = Seat(table, "a")
    impostor.open()
    assert impostor.got(m.Hold)
    table.tick(5.0)
    impostor.take()
    assert "unique" in impostor.pop(r.GiveUp).reason
    assert a.conn is not None and b.conn is not None
    assert a.machine.incarnation == 1


def test_11_a_newcomer_supersedes_one_behind_a_half_open_link() -> None:
    table = Table()
    a, b = table.start("a", "b")
    assert a.conn is not None
    del table.seats_by_conn[a.conn]  # its host lost power: nobody says so
    again = Seat(table, "a")
    again.open()
    assert again.got(m.Hold)
    table.tick(4.0)
    again.take()
    assert again.machine.incarnation == 2
    assert again.record.version == 0
    b.take()
    assert b.machine.known.gone == {"a": 1}


def test_11_a_newcomer_that_connects_anew_while_it_waits_is_one_process() -> None:
    """The connection on which it came first is lost, and nobody says so: it is not refused because of itself."""
    table = Table()
    a, _ = table.start("a", "b")
    assert a.conn is not None
    del table.seats_by_conn[a.conn]
    again = Seat(table, "a")
    again.open()
    again.take()
    assert again.conn is not None
    del table.seats_by_conn[again.conn]
    again.do(again.machine.disconnect())
    again.open()
    table.tick(4.0)
    again.take()
    assert again.machine.incarnation == 2
    assert again.record.version == 0
    assert not [x for x in again.asked if isinstance(x, r.GiveUp)]


def test_11_a_newcomer_waits_anew_for_another_one_that_was_let_in_before_it() -> None:
    """Whether that one lives is not known yet: its connection may be lost as well."""
    table = Table()
    a, _ = table.start("a", "b")
    first, second = Seat(table, "a", address="here"), Seat(table, "a", address="there")
    for lost in (a, first):
        if lost is first:
            first.open()
        assert lost.conn is not None
        del table.seats_by_conn[lost.conn]
    second.open()
    table.tick(4.0)
    assert table.coordinator.roster.members["a"].incarnation == 2
    assert not second.got(m.Refuse)
    table.tick(4.0)
    second.take()
    assert second.machine.incarnation == 3


def test_11_a_coordinator_of_the_past_stops() -> None:
    """EPOCH: it meets a replica that knows a higher one; and a replica refuses it."""
    table = Table()
    a, _ = table.start("a", "b")
    hello = a.machine.hello()
    fields = {name: getattr(hello, name) for name in hello.__dataclass_fields__} | {"epoch": 99}
    table.do(table.coordinator.receive(table.now, 77, m.Hello(**fields)))
    assert table.coordinator.halted
    a.machine.epoch = 99
    a.cut()
    a.conn = 5
    a.do(a.machine.receive(m.Welcome(1, 1, (), ())))
    assert a.pop(r.Disconnect)


def test_12_after_two_failures_of_one_pair_one_of_the_two_sits_out() -> None:
    """A and B can't reach each other; both reach the coordinator and C."""
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b, c):
        seat.propose(5)
    for _ in range(2):
        a.take()
        attempt = a.pop(r.StartReduce).quorum.attempt
        a.do(a.machine.reduce_failed(0, attempt, reason="no piece for 3 s", peer="b"))
        b.take()
        c.take()
        table.tick(1.0)
    b.reduce()
    c.reduce()
    b.take()
    assert b.record.counted == (("b", 1, 5), ("c", 1, 5)), "A has complained, B has not"
    a.take()
    assert a.pop(r.Fetch).sources == ("b", "c")


def test_13_a_trainer_that_hangs_behind_its_proposal_keeps_nobody_waiting() -> None:
    table = Table()
    a, b = table.start("a", "b")
    b.propose(5)
    b.say(m.Heartbeat("training", 5, 1.0))  # and never again: only its other threads live on
    a.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    b.take()
    assert a.record.version == b.record.version == 1
    assert not table.events("stalled")


def test_14_who_evaluates_is_waited_for_within_the_grace_and_not_held_for_hung() -> None:
    table = Table()
    a, b = table.start("a", "b")
    b.say(m.Heartbeat("evaluating", 1, 20.0))
    a.propose(5)
    assert not a.got(m.Quorum)
    table.now += 2.0
    table.do(table.coordinator.tick(table.now))
    assert a.got(m.Quorum)[0].size == 1
    assert not table.events("stalled")


def test_17_losing_the_coordinator_ends_the_wait() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    assert a.machine.fragments[0].outstanding
    assert not a.machine.fragments[0].released
    a.cut()
    assert a.machine.fragments[0].released
    assert a.machine.fragments[0].outstanding  # FREEZE: the contribution is offered again
    b.propose(5)
    a.connect()
    assert a.machine.fragments[0].contribution is not None


def test_15_a_slow_trainer_is_waited_for_two_of_its_steps() -> None:
    table = Table()
    a, b = table.start("a", "b")
    b.say(m.Heartbeat("training", 1, 20.0))
    a.propose(5)
    table.now += 2.0
    table.do(table.coordinator.tick(table.now))
    assert b.got(m.CallIn)
    assert table.coordinator.deadline_s() <= table.now + 3.0  # for heartbeats
    for _ in range(39):
        table.now += 1.0
        a.say(m.Heartbeat("waiting", 5, 1.0))
        b.say(m.Heartbeat("training", 1, 20.0))
        table.do(table.coordinator.tick(table.now))
    assert not a.got(m.Quorum)
    b.propose(2)
    assert a.got(m.Quorum)


def test_16_a_joiner_that_missed_a_version_is_waited_for_once() -> None:
    table = Table()
    a, b = table.start("a", "b")
    c = Seat(table, "c", "random")
    c.open()
    c.take()
    fetch = c.pop(r.Fetch)
    served = a.machine.fragments[0].serves()
    assert served is not None and served.position == fetch.position
    a.propose(5)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    b.take()
    c.take()
    assert c.machine.install(served)  # the source has kept the version that it served
    c.do(c.machine.fetched(served))
    assert c.record.version == 0
    a.propose(10)
    b.propose(10)
    assert not a.got(m.Quorum)  # C is catching up
    c.fetch(a)
    assert c.record.version == 1
    c.propose(1)
    assert a.got(m.Quorum)[0].size == 3


def test_18_two_members_that_disagree_twice_adopt_the_first_ones_result() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    for _ in range(2):
        a.reduce("one")
        b.reduce("another")
    assert len(table.events("mismatch")) == 2
    a.take()
    assert a.record.version == 1
    b.fetch(a)
    assert b.record == a.record
    assert b.machine.counted_step(b.record) == 5


def test_19_members_without_weight_form_no_attempt() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(0)
    b.propose(0)
    a.take()
    assert table.events("void")
    assert table.version == 0
    assert not a.machine.fragments[0].outstanding


def test_19_a_newcomer_without_steps_has_no_weight() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(0)
    (quorum,) = a.got(m.Quorum)
    assert (quorum.size, quorum.contributors, quorum.total_weight) == (2, 1, 5.0)


def test_20_messages_of_an_aborted_attempt_do_nothing_in_the_next_one() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.take()
    old = a.pop(r.StartReduce).quorum
    b.take()
    b.do(b.machine.reduce_failed(0, old.attempt, reason="cable"))
    table.tick(1.0)
    (new,) = a.got(m.Quorum)
    assert new.attempt > old.attempt
    assert new.group != old.group  # abort destroys the group
    a.do(a.machine.reduced(0, old.attempt, "stale", [[5], [5]]))
    a.say(m.Prepared(0, old.attempt, "stale"))
    b.say(m.Prepared(0, old.attempt, "stale"))
    b.say(m.Failed(0, old.attempt, "stale", "a"))
    assert table.version == 0
    assert len(table.events("abort")) == 1
    a.reduce()
    b.reduce()
    assert table.version == 1


def test_22_a_leaver_waits_for_the_round_and_calls_nobody_in() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.do(a.machine.say(m.Leaving()))
    a.propose(3)
    table.tick(5.0)
    assert not b.got(m.CallIn)
    assert not a.got(m.Quorum)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.take()
    assert a.machine.counted_step(a.record) == 3
    a.say(m.Bye())
    assert table.events("leave")
    assert table.coordinator.roster.gone == {"a": 1}


def test_who_leave_together_hand_in_together() -> None:
    table = Table()
    seats = table.start("a", "b", "c")
    for seat in seats:
        seat.do(seat.machine.say(m.Leaving()))
    seats[0].propose(3)
    table.tick(0.1)
    seats[1].propose(4)
    assert not seats[0].got(m.Quorum)
    seats[2].say(m.Bye())  # it has nothing left
    for seat in seats[:2]:
        seat.reduce()
    seats[0].take()
    seats[1].take()
    assert [seat.machine.counted_step(seat.record) for seat in seats[:2]] == [3, 4]


def test_a_leaver_that_hands_nothing_in_holds_the_others_up_for_half_a_second() -> None:
    table = Table()
    a, b = table.start("a", "b")
    b.do(b.machine.say(m.Leaving()))
    a.do(a.machine.say(m.Leaving()))
    a.propose(3)
    table.tick(0.4)
    assert not a.got(m.Quorum)
    table.wait(0.2)
    a.reduce()
    a.take()
    assert a.machine.counted_step(a.record) == 3


def test_who_lacks_the_newest_version_may_still_hold_the_one_before() -> None:
    """ROLLBACK, and the last one who holds a version is away: no cold start beside it."""
    table = Table(recovery_s=5.0)
    a, b = table.start("a", "b")
    a.propose(5)
    table.tick(3.0)  # B hangs
    a.reduce()
    a.take()
    a.cut()
    b.take()
    b.pop(r.Fetch)
    b.do(b.machine.fetch_failed(0))
    anew = a.die()
    anew.connect()
    assert table.events("rollback")
    for seat in (anew, b):
        if seat.conn is not None:
            seat.cut()
    anew.connect()
    table.tick(60.0)
    anew.take()
    assert anew.machine.fragments[0].record is None
    b.connect()
    anew.take()
    anew.fetch(b)
    assert anew.record == b.record


def test_a_leaver_that_alone_holds_the_newest_version_stays_until_another_one_has_it() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    table.tick(3.0)
    a.reduce()
    a.take()
    assert (a.record.version, b.record.version) == (1, 0)
    a.say(m.Bye())
    assert a.conn is not None
    b.fetch(a)
    assert b.record == a.record
    assert a.conn is None
    assert not table.events("rollback")


def test_a_leaver_that_is_kept_for_what_it_holds_and_connects_anew_has_left() -> None:
    """That the first connection has ended is not known yet; a process that resumes at its address is no other case."""
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    table.tick(3.0)
    a.reduce()
    a.take()
    a.say(m.Bye())
    assert a.conn is not None, "b does not hold that version yet"
    a.do(a.machine.disconnect())
    a.open()
    assert "has left" in a.pop(r.Reset).reason
    assert table.coordinator.roster.gone == {"a": 1}
    assert [x.replica for x in table.events("leave")] == ["a"]
    b.take()
    b.do(b.machine.fetch_failed(0))
    b.connect()
    assert b.machine.welcomed and b.record.version == 0


def test_a_decision_that_was_journalled_and_told_to_nobody_stands() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce()
    b.reduce()
    a.inbox.clear()
    b.inbox.clear()
    table.restart(journal=True)
    a.open()
    b.open()
    a.take()
    b.take()
    assert a.record.version == 1
    assert a.record == b.record


def test_an_incarnation_that_two_coordinators_gave_away_is_not_taken_for_the_other() -> None:
    """Without memory a number may be given twice: the steps counted under it are another process'."""
    table = Table(start_replicas=1)
    a = Seat(table, "a")
    a.connect()
    a.propose(5)
    a.reduce()
    a.take()
    assert a.record.counted == (("a", 1, 5),)
    served = a.record
    table.restart(journal=False)
    other = Seat(table, "a")
    other.connect()
    table.tick(31.0)
    other.take()
    assert other.machine.incarnation == 1
    other.do(other.machine.receive(m.Behind(served.position, ("a",), False)))
    assert other.machine.install(served)
    other.do(other.machine.fetched(served))
    assert other.pop(r.Reset)


def test_who_was_left_out_as_an_outlier_is_not_taken_for_another_process_past_steps_that_it_has_dropped() -> None:
    """Its entry in COUNT is where its contribution begins: behind steps that it has dropped, which nobody counts."""
    table = Table()
    a, b = table.start("a", "b")
    a.do(a.machine.propose(m.Contribution(0, 0, 5, 5, 5.0, norm=1.0, excess=1.0)))
    b.do(b.machine.propose(m.Contribution(0, 0, 3, 7, 3.0, norm=1e9, excess=1e9)))
    a.reduce()
    b.reduce()
    a.take()
    assert a.record.counted == (("a", 1, 5), ("b", 1, 4))
    table.restart(journal=False)  # the decision has not reached it, and is not known any more
    a.open()
    b.open()
    b.fetch(a)
    assert not [x for x in b.asked if isinstance(x, r.Reset)]
    assert (b.machine.incarnation, b.record) == (1, a.record)


def test_12_sitting_out_never_takes_a_quorum_below_min_replicas() -> None:
    table = Table(min_replicas=2)
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    for _ in range(3):
        a.take()
        b.take()
        attempt = a.pop(r.StartReduce).quorum.attempt
        a.do(a.machine.reduce_failed(0, attempt, reason="no piece for 3 s", peer="b"))
        b.take()
        table.tick(1.0)
    a.reduce()  # the cable is mended
    b.reduce()
    a.take()
    assert a.record.version == 1


def test_no_tick_is_asked_for_that_has_just_been() -> None:
    """In one and the same tick a silent one is superseded, and with that somebody is there to forget another one."""
    table = Table(evict_after_s=6.0)
    a, b = table.start("a", "b")
    b.cut()
    table.now += 3.0
    a.say(m.Heartbeat("training", 1, 0.1))
    Seat(table, "a").open()
    table.wait(3.0)
    assert table.coordinator.roster.incarnation_ids() == (("a", 2), ("b", 1))
    assert table.coordinator.deadline_s() > table.now
    table.wait(0.02)
    assert table.coordinator.roster.incarnation_ids() == (("a", 2),)


def test_who_leaves_is_a_source_only_where_nobody_else_holds_the_version() -> None:
    table = Table(start_replicas=3)
    a, b, c = table.start("a", "b", "c")
    for seat in (a, b):
        seat.propose(5)
    table.tick(3.0)  # C is late by more than the grace
    a.do(a.machine.say(m.Leaving()))
    a.reduce()
    b.reduce()
    c.take()
    assert c.pop(r.Fetch).sources == ("b",)
    b.die()
    c.do(c.machine.fetch_failed(0))
    table.tick(3.0)
    c.take()
    assert c.pop(r.Fetch).sources == ("a",)


def test_11_a_newcomer_does_not_overtake_one_that_waits_under_its_id() -> None:
    """The first one waits since its predecessor's connection seemed to live; that is lost, and another one comes."""
    table = Table()
    a, b = table.start("a", "b")
    first, second = Seat(table, "a", address="here"), Seat(table, "a", address="there")
    first.connect()
    table.tick(2.0)
    a.cut()
    second.connect()
    for _ in range(8):
        table.tick(1.0)
        for seat in (b, first, second):
            seat.take()
    assert first.machine.welcomed and first.machine.incarnation == 2
    assert not second.machine.welcomed
    assert "end the other process" in second.pop(r.GiveUp).reason


@pytest.mark.parametrize("fetched", [True, False])
def test_3_one_that_knows_a_former_start_ends_nobody_of_this_one(fetched: bool) -> None:
    """CHAIN: C stood still while the coordinator lost its journal and all others were started again. In the start that
    it knows A and B had died before, and their numbers are used again."""
    table = Table()
    a, b, *others = table.start("a", "b", *(["c"] if fetched else []))
    c = others[0] if others else Seat(table, "c", "its own")
    if not fetched:
        c.open()
    for dead in (a, b):
        dead.die().open()
    c.take()
    assert {("a", 1), ("b", 1)} <= set(c.machine.hello().gone)
    assert len(c.machine.hello().positions) == fetched
    table.restart(journal=False)
    a, b = Seat(table, "a"), Seat(table, "b")
    a.open()
    b.open()
    table.tick(31.0)
    for seat in (a, b):
        seat.take()
        seat.propose(5)
    for seat in (a, b):
        seat.reduce()
    assert table.version == 1
    table.told.clear()
    c.open()
    assert "the job has begun anew" in c.pop(r.Reset).reason
    assert not c.machine.known.gone
    c.connect()
    c.fetch(a)
    assert [x.incarnation_id for x in table.coordinator.roster.connected()] == [
        ("a", 1), ("b", 1), ("c", c.machine.incarnation)
    ]  # fmt: skip
    assert {x.replica for x in table.events("gone")} == {"c"}
