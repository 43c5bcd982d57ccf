"""A global batch among real machines: what is computed again when somebody fails, and that it is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members.batch_shares import BatchShares
from ftopt.sync.protocol.intervals import Ranges, intersect, size
from ftopt.sync.protocol.ledger.plans import Portion
from ftopt.sync.protocol.replica.effects import ReplicaEffect, StartReduce
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.samples import Samples
from tests.sync.protocol.batch_table import SAMPLES, Batches, journalled, walk


def test_a_batch_is_shared_out_and_committed_whole() -> None:
    job = Batches("a", "b", "c")
    assert job.shares == {"a": ((0, 2),), "b": ((2, 4),), "c": ((4, 6),)}
    job.work("abc")
    job.reduce("abc")
    assert job.version == 1
    assert job["a"].seat.record.done == ((0, 6),)
    assert job.shares == {"a": ((6, 8),), "b": ((8, 10),), "c": ((10, 12),)}
    assert [d.done for d in journalled(job.table)] == [(), ((0, 6),)]


def test_replicas_that_still_fetch_the_jobs_first_state_have_shares_of_the_first_batch() -> None:
    job = Batches("a", "b", "c", alike=False)
    holders = [x for x in "abc" if job[x].seat.machine.fragments[0].record is not None]
    assert len(holders) == 1
    assert job.shares == {"a": ((0, 2),), "b": ((2, 4),), "c": ((4, 6),)}
    for x in "abc":
        job.fetch(job[x])
    job.work("abc")
    job.reduce("abc")
    assert job.version == 1
    assert [job[x].computed for x in "abc"] == [2, 2, 2]
    job.work("abc")
    job.reduce("abc")
    assert job.version == 2


def test_the_others_compute_the_share_of_a_replica_that_does_not_come_to_hold_the_first_state() -> None:
    job = Batches("a", "b", "c", alike=False)
    fetching = [x for x in "abc" if job[x].seat.machine.fragments[0].record is None]
    lost = fetching[-1]
    job.fetch(job[fetching[0]])
    others = "".join(x for x in "abc" if x != lost)
    job.work(others)
    job.work(others)
    assert set(job.shares) == set(others)
    job.reduce(others)
    assert job.version == 1
    assert [job[x].computed for x in others] == [3, 3]
    job.fetch(job[lost])
    for version in (2, 3):
        job.work("abc")
        job.reduce("abc")
        assert job.version == version
    assert set(job.shares) == set("abc"), "it has a share again once it holds the state"


def test_one_that_dies_before_the_reduction_costs_its_own_units() -> None:
    job = Batches("a", "b", "c")
    job.work("ac")
    job["b"].begin()
    job["b"].seat.cut()
    job.work("ac")
    assert job.shares == {"a": ((0, 3),), "c": ((3, 6),)}
    job.reduce("ac")
    assert job.version == 1
    assert [job[x].computed for x in "ac"] == [3, 3], "two were computed again, not six"


def test_one_that_dies_in_the_reduction_costs_its_own_units() -> None:
    job = Batches("a", "b", "c")
    job.work("abc")
    job["a"].take()
    first = job["a"].frozen_now
    job["b"].seat.cut()
    job["a"].take()
    assert first is not None
    assert job["a"].frozen_now is None, "free to be extended: the attempt was aborted"
    job.work("ac")
    job.reduce("ac")
    assert job.version == 1
    assert [job[x].computed for x in "ac"] == [3, 3]


def test_one_that_dies_after_it_has_prepared_costs_nothing() -> None:
    job = Batches("a", "b", "c")
    job.work("abc")
    job["b"].reduce()
    job["b"].seat.cut()
    job.reduce("ac")
    assert job.version == 1
    assert [job[x].computed for x in "ac"] == [2, 2]
    job["b"].seat.open()
    job["b"].take()
    assert job["b"].seat.record == job["a"].seat.record, "it learns what it had prepared"


def test_a_false_suspect_loses_its_micro_batches_and_nothing_else() -> None:
    job = Batches("a", "b", "c")
    job["b"].work()
    job["b"].seat.cut()
    job["a"].take()
    assert set(job.shares) == {"a", "c"}
    job["b"].seat.open()
    job["b"].work()
    assert (job["b"].portion.units, job["b"].sum) == ((), [])
    assert job["b"].seat.machine.incarnation == 1
    job.work("ac")
    job.reduce("abc")
    assert job.version == 1
    assert set(job.shares) == {"a", "b", "c"}, "in the next batch it has a share again"


def test_a_joiner_brings_nothing_at_first_and_has_a_share_of_the_next_batch() -> None:
    job = Batches("a", "b")
    job.work("ab")
    job.reduce("ab")
    job.work("a")
    d = job.join("d")
    assert job.fetch(d)
    d.work()
    assert d.portion.units == ()
    job.work("b")
    job.reduce("abd")
    assert job.version == 2
    assert job.shares == {"a": ((12, 14),), "b": ((14, 16),), "d": ((16, 18),)}


def test_four_micro_batches_go_to_three_replicas_and_to_two() -> None:
    job = Batches("a", "b", "c", samples=Samples(samples=100, batch_size=2, global_batch=8))
    assert job.shares == {"a": ((0, 2),), "b": ((2, 3),), "c": ((3, 4),)}
    job.work("abc")
    job["c"].seat.cut()
    job.work("ab")
    job.reduce("ab")
    job.work("ab")
    job.reduce("ab")
    assert job.version == 2
    assert [job[x].computed for x in "ab"] == [3 + 2, 1 + 2]


def test_more_replicas_than_units_take_part_with_nothing() -> None:
    job = Batches("a", "b", "c", samples=Samples(samples=100, batch_size=4, global_batch=8))
    for version in (1, 2):
        job.work("abc")
        job.reduce("abc")
        assert job.version == version


@pytest.mark.parametrize("journal", [True, False])
def test_a_restarted_coordinator_leaves_everybody_what_it_has(journal: bool) -> None:
    job = Batches("a", "b", "c")
    job.work("ab")
    job.table.restart(journal=journal)
    for name in "abc":
        job[name].seat.open()
    job.work("abc")
    job.reduce("abc")
    assert job.version == 1
    assert [job[x].computed for x in "abc"] == [2, 2, 2]


def test_after_a_restart_the_share_of_who_is_missing_goes_to_the_others() -> None:
    job = Batches("a", "b", "c")
    job.work("ab")
    job.table.restart(journal=True)
    for name in "ab":
        job[name].seat.open()
    job.table.tick(4.0)
    job.work("ab")
    job.reduce("ab")
    assert job.version == 1
    assert [job[x].computed for x in "ab"] == [3, 3]


def test_a_hung_trainer_loses_its_share_after_the_grace() -> None:
    job = Batches("a", "b", "c")
    job.work("ac")
    job.table.tick(2.0)  # the grace
    job.table.tick(1.0)  # and half a second
    assert set(job.shares) == {"a", "c"}
    job.work("ac")
    job.table.tick(4.0)
    job.reduce("ac")
    assert job.version == 1


def test_a_reducer_that_hangs_alone_with_the_whole_batch_loses_it_to_who_had_no_share() -> None:
    """Who has no share can propose nothing, and so could not end an attempt that nobody else is in."""
    job = Batches("a", "b")
    job["b"].seat.cut()
    job["a"].seat.hangs = True
    job["a"].work()
    job["a"].work()  # what it has inherited, too
    job["a"].take()
    assert len(job["a"].frozen) == 1, "it is alone in an attempt"
    job["b"].seat.open()
    job["b"].take()
    assert job.shares == {"a": ((0, 6),)}, "no plan while an attempt is undecided"
    job.table.tick(6.0)
    assert job.shares == {"b": ((0, 6),)}
    job.work("ab")  # of a: nothing
    job.reduce("b")
    assert job.version == 1


def test_a_reducer_that_hangs_alone_with_the_whole_batch_loses_it_to_who_came_late() -> None:
    """All others have lost their shares in this round already: they are the only ones left."""
    job = Batches("a", "b", "c")
    job["a"].seat.hangs = True
    job["a"].work()
    job.table.tick(4.0)  # the grace, and half a second: B and C are late
    job["a"].work()
    job["a"].take()
    assert job.shares == {"a": ((0, 6),)}
    assert len(job["a"].frozen) == 1, "it is alone in an attempt"
    for name in "bc":
        job[name].seat.say(m.Heartbeat("training", 2, 0.1))  # they go on
    job.table.tick(6.0)
    assert set(job.shares) == {"b", "c"}
    job["b"].work()
    assert job.shares == {"b": ((0, 6),)}, "it is not late any more, and C still is"
    job["b"].work()
    job.table.tick(4.0)
    job.reduce("b")
    assert job.version == 1


def test_a_leaver_hands_in_what_it_has_proposed() -> None:
    job = Batches("a", "b", "c")
    job.work("b")
    job["b"].seat.do(job["b"].seat.machine.say(m.Leaving()))
    job["c"].seat.do(job["c"].seat.machine.say(m.Leaving()))
    assert job.shares == {"a": ((0, 2), (4, 6)), "b": ((2, 4),)}
    job.work("ac")
    job.reduce("abc")
    assert job.version == 1
    assert job["a"].computed == 4


def test_the_end_of_the_data_is_told_to_all_and_to_who_comes_late() -> None:
    job = Batches("a", "b", samples=Samples(samples=10, batch_size=1, global_batch=8, epochs=1))
    for _ in range(2):
        job.work("ab")
        job.reduce("ab")
    assert job.version == 2
    assert [len(job.table.events(x)) for x in ("epoch_done", "data_ended")] == [1, 1]
    assert job["a"].seat.machine.lease.plan.ended
    d = job.join("d")
    assert job.fetch(d)
    assert d.seat.machine.lease.plan.ended


def test_a_quorum_that_names_another_plan_is_refused() -> None:
    job = Batches("a", "b")
    job.work("ab")
    quorum = job["a"].seat.got(m.Quorum)[0]
    job["a"].seat.inbox.clear()
    job["a"].seat.do(job["a"].seat.machine.receive(m.Quorum(**{**_fields(quorum), "plan": quorum.plan + 1})))
    assert job.table.events("abort"), "COVER: what it froze is not what the quorum names"


def _fields(message: m.Quorum) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__slots__}


def test_a_proposal_of_an_older_plan_does_not_count() -> None:
    job = Batches("a", "b", "c")
    for name in "ac":
        job[name].take()
        for _ in range(2):
            job[name].begin()
            job[name].end()
    job["b"].seat.cut()
    job["a"].offer()  # on its way when the plan changed
    assert "a" not in job.table.coordinator.rounds[0].gather.proposals
    job.work("ac")
    job.reduce("ac")
    assert job.version == 1
    assert [job[x].computed for x in "ac"] == [3, 3]


def test_a_job_that_starts_from_a_state_with_units_in_it_goes_on_behind_them() -> None:
    """All are evicted, and the journal is lost: the initial source's state becomes version 0 of another start."""
    job = Batches("a", "b", start_s=1.0)
    job.work("ab")
    job.reduce("ab")
    assert job["a"].seat.record.done == ((0, 6),)
    job.table.restart(journal=False)
    for worker in job.workers.values():
        worker.seat.do(worker.seat.machine.receive(m.Refuse("gone", "evicted")))
        worker.seat.open()
    job.table.tick(31.0)
    for worker in job.workers.values():
        worker.take()
    assert job.version == 0
    assert job.shares == {"a": ((6, 9),), "b": ((9, 12),)}


def test_the_share_of_one_that_dies_goes_to_who_has_least_left() -> None:
    """One has handed in its share, one says that it has only begun: the coordinator knows both."""
    job = Batches("a", "b", "c", samples=Samples(samples=1000, batch_size=1, global_batch=12))
    job.work("c")
    a = job["a"]
    a.take()
    a.begin()
    a.end()
    a.seat.say(m.Heartbeat("training", 0, 0.1, (), a.portion.plan, a.portion.left))
    job["b"].seat.cut()
    assert a.portion.left == 3
    assert {x: size(units) for x, units in job.shares.items()} == {"a": 5, "c": 7}
    job.work("ac")
    job.reduce("ac")
    assert job.version == 1


def test_what_was_computed_for_another_version_is_dropped() -> None:
    job = Batches("a", "b", "c")
    c = job["c"]
    c.take()
    c.begin()
    c.end()
    c.seat.cut()
    job.work("ab")
    job.reduce("ab")
    assert job.version == 1
    c.seat.open()
    assert job.fetch(c)
    assert c.portion.units == ()
    for version in (2, 3):
        job.work("abc")
        job.reduce("abc")
        assert job.version == version


def test_nobody_has_a_share_without_reaching_the_others() -> None:
    """Of two that are cut from each other one sits out, and its share is another's."""
    job = Batches("a", "b", "c")
    for _ in range(2):
        job.work("abc")
        for name in "abc":
            job[name].take()
        attempt = job["a"].seat.pop(StartReduce).quorum.attempt
        job["a"].seat.do(job["a"].seat.machine.reduce_failed(0, attempt, reason="no way", peer="b"))
        for name in "abc":
            job[name].take()
        job.table.wait(0.5)
    assert set(job.shares) == {"a", "c"} or set(job.shares) == {"b", "c"}
    job.work("abc")
    job.table.wait(0.5)
    job.reduce("abc")
    assert job.version == 1


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_commit_whole_batches_and_go_on(seed: int) -> None:
    walk(seed, journal=seed % 2 == 0)


def _keep_everything(self: Portion, version: int, plan: int, units: Ranges) -> None:
    if version != self.version:
        self.drop()
    self.version, self.plan, self.units = version, plan, units
    self.kept = intersect(self.kept, units)


def _keep_the_sum(self: Portion) -> None:
    self.kept = ()


def _offer_whatever_was_frozen(self: Replica, plan: m.Plan) -> list[ReplicaEffect]:
    f = self.fragments[0]
    if f.record is None or plan.version != f.record.version + 1:
        return []
    self.lease.plan = plan
    if f.offer is not None:
        f.offer.contribution = replace(f.offer.contribution, plan=plan.plan, ranges=plan.units)
    return [plan]


def _fits_any_plan(self: BatchShares, incarnation_id: m.IncarnationId, contribution: m.Contribution) -> bool:
    return True


@pytest.mark.parametrize(
    ("owner", "name", "without", "scenario"),
    [
        pytest.param(
            Portion, "assign", _keep_everything, test_a_false_suspect_loses_its_micro_batches_and_nothing_else, id="own"
        ),
        pytest.param(Portion, "drop", _keep_the_sum, test_what_was_computed_for_another_version_is_dropped, id="tie"),
        pytest.param(
            Replica,
            "_take_plan",
            _offer_whatever_was_frozen,
            test_one_that_dies_in_the_reduction_costs_its_own_units,
            id="plan",
        ),
        pytest.param(BatchShares, "fits", _fits_any_plan, test_a_proposal_of_an_older_plan_does_not_count, id="cover"),
    ],
)
def test_without_a_rule_its_scenario_goes_wrong(
    owner: type, name: str, without: object, scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, without)
    with pytest.raises(AssertionError):
        scenario()


def test_who_has_no_share_does_not_count_as_hung_and_gets_that_of_one_that_dies() -> None:
    """A batch of fewer units than replicas: who has none has nothing to propose."""
    job = Batches("a", "b", samples=replace(SAMPLES, global_batch=1), dead_after_s=10.0, evict_after_s=600.0)
    table = job.table

    def goes_on(who: str) -> None:
        table.wait(0.5)
        for name in who:
            job[name].seat.say(m.Heartbeat("waiting", 1, 0.1))
            job[name].take()

    for _ in range(8):
        job["a"].work()
        while not any(isinstance(x, StartReduce) for x in job["a"].seat.asked):
            goes_on("ab")
        job.reduce("ab")
        job.fetch(job["b"])
        goes_on("ab")
    assert not table.events("stalled")
    job["a"].seat.cut()
    died_s = table.now
    while "b" not in job.shares:
        goes_on("b")
        assert table.now < died_s + 15.0
