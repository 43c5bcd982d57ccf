"""Plans of a global batch by themselves: the shares, and what a replica keeps of its own."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftopt.sync.protocol.intervals import Ranges, size
from ftopt.sync.protocol.ledger import plans
from ftopt.sync.protocol.ledger.plans import BatchPlan, Portion, first_plan, restart, share_out
from ftopt.sync.protocol.messages import IncarnationId
from ftopt.sync.protocol.samples import Samples
from tests.sync.protocol.batch_table import batch

A, B, C, D = ("a", 1), ("b", 1), ("c", 1), ("d", 1)
SPEEDS = {A: 0.1, B: 0.1, C: 0.1}


def one_by_one(ranges: Ranges) -> list[int]:
    return [x for start, stop in ranges for x in range(start, stop)]


# ---------------------------------------------------------------- BATCH and shares


def test_batches_follow_one_another_through_the_epochs_up_to_the_end_of_the_data() -> None:
    samples = Samples(samples=22, batch_size=4, global_batch=16, epochs=2)
    assert samples.units == 12
    assert [batch(samples, version) for version in (1, 2, 3, 4)] == [((0, 4),), ((4, 8),), ((8, 12),), ()]
    assert samples.count(batch(samples, 2)) == 4 + 2 + 4 + 4  # the first epoch's last unit is short
    assert batch(Samples(samples=10, batch_size=1, global_batch=4, epochs=1), 3) == ((8, 10),)


@pytest.mark.parametrize("global_batch", [0, 6, -4])
def test_a_global_batch_is_made_of_whole_units(global_batch: int) -> None:
    with pytest.raises(ValueError, match=r"global_batch=-?\d with batch_size=4; must be a multiple of it, such as \d"):
        Samples(samples=100, batch_size=4, global_batch=global_batch)


def test_a_global_batch_of_very_many_units_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 16,384 micro-batches; use a larger batch_size"):
        Samples(samples=10**9, batch_size=1, global_batch=10**6)


def test_four_micro_batches_are_shared_out_among_three() -> None:
    assert share_out(((8, 12),), SPEEDS) == {A: ((8, 10),), B: ((10, 11),), C: ((11, 12),)}


def test_who_gets_nothing_has_no_share() -> None:
    assert share_out(((0, 2),), SPEEDS) == {A: ((0, 1),), B: ((1, 2),)}


def test_shares_go_by_speed_where_that_is_sooner() -> None:
    assert share_out(((0, 8),), {A: 0.3, B: 0.1}) == {A: ((0, 2),), B: ((2, 8),)}
    assert share_out(((0, 3), (7, 8)), {A: 0.3, B: 0.1}) == {A: ((0, 1),), B: ((1, 3), (7, 8))}


def test_noise_in_the_speeds_does_not_decide_the_shares() -> None:
    even = share_out(((0, 12),), dict.fromkeys(SPEEDS, 0.0))
    assert even == share_out(((0, 12),), {A: 0.1, B: 0.12, C: 0.11})


def test_everybody_has_a_unit_of_each_batch_and_is_measured_again() -> None:
    assert first_plan(1, 1, ((0, 8),), {A: 9.0, B: 0.1}).shares == {A: ((0, 1),), B: ((1, 8),)}
    assert first_plan(1, 1, ((0, 1),), {A: 9.0, B: 0.1}).shares == {B: ((0, 1),)}


def test_units_that_take_no_time_are_shared_out_evenly() -> None:
    assert share_out(((0, 4),), {A: 0.01, B: 0.001}) == {A: ((0, 2),), B: ((2, 4),)}


def test_who_is_not_measured_yet_counts_as_the_others() -> None:
    assert share_out(((0, 8),), {A: 0.3, B: 0.1, C: 0.0}) == {A: ((0, 1),), B: ((1, 6),), C: ((6, 8),)}


@given(st.integers(0, 60), st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.11, 3.0]), min_size=1, max_size=6))
def test_every_unit_has_one_owner_and_nobody_waits_much_longer_than_needed(count: int, unit_s: list[float]) -> None:
    speeds = {(f"r{i}", 1): s for i, s in enumerate(unit_s)}
    units: Ranges = ((3, 3 + count),) if count else ()
    shares = share_out(units, speeds)
    assert sorted(x for share in shares.values() for x in one_by_one(share)) == one_by_one(units)
    known = [s for s in unit_s if s]
    pace = {incarnation_id: s or (sum(known) / len(known) if known else 1.0) for incarnation_id, s in speeds.items()}
    takes = max((size(share) * pace[incarnation_id] for incarnation_id, share in shares.items()), default=0.0)
    ideal = count / sum(1 / s for s in pace.values())
    assert takes <= plans.EVEN * (ideal + max(pace.values())) + plans.WORTH_S


# ---------------------------------------------------------------- PLAN


def test_only_the_share_of_who_is_lost_is_computed_again() -> None:
    """Three replicas, 8 samples each in units of 4: 8 are recomputed, not 24."""
    plan = first_plan(1, 1, ((0, 6),), SPEEDS)
    assert plan.shares == {A: ((0, 2),), B: ((2, 4),), C: ((4, 6),)}
    assert plan.lost([A, B, C]) == ()
    assert plan.lost([A, C]) == ((2, 4),)
    after = plan.without(2, [A, C], {A: 0.1, C: 0.1}, {})
    assert after.shares == {A: ((0, 3),), C: ((3, 6),)}
    assert (after.number, after.version, after.batch) == (2, 1, ((0, 6),))


def test_a_joiner_takes_over_what_was_lost_and_a_leaver_keeps_what_it_has_done() -> None:
    plan = first_plan(1, 1, ((0, 6),), SPEEDS)
    after = plan.without(2, [A, C], {A: 0.1, D: 0.1}, {})
    assert after.shares == {A: ((0, 3),), C: ((4, 6),), D: ((3, 4),)}


def test_what_was_lost_goes_first_to_those_who_have_least_left() -> None:
    plan = BatchPlan(1, 1, ((0, 12),), {A: ((0, 4),), B: ((4, 8),), C: ((8, 12),)})
    speeds = {A: 0.1, C: 0.1}
    after = plan.without(2, [A, C], speeds, {A: 4, C: 0})
    assert after.shares == {A: ((0, 4),), C: ((4, 12),)}, "C is done with all of it when A is with its own"
    after = plan.without(2, [A, C], speeds, {A: 3, C: 1})
    assert {x: size(share) for x, share in after.shares.items()} == {A: 5, C: 7}
    after = plan.without(2, [A, C], {A: 0.1, C: 1.0}, {A: 3, C: 1})
    assert {x: size(share) for x, share in after.shares.items()} == {A: 8, C: 4}, "who has less left is much slower"


# ---------------------------------------------------------------- COVER


def test_a_quorum_covers_the_batch_with_shares_of_the_newest_plan() -> None:
    plan = first_plan(1, 1, ((0, 6),), SPEEDS)
    whole = dict(plan.shares)
    assert plan.covers(whole)
    assert plan.covers({**whole, D: ()}), "a newcomer brings nothing"
    assert not plan.covers({A: whole[A], C: whole[C]})
    assert not plan.covers({A: ((0, 4),), C: whole[C]})
    assert not plan.without(2, [A, C], {A: 0.1}, {}).covers(whole)


# ---------------------------------------------------------------- RESTART


def test_after_a_restart_replicas_keep_what_they_claim_newest_plan_first() -> None:
    claims = {A: (1, ((0, 2),)), B: (2, ((2, 4),)), C: (2, ((1, 2), (4, 6)))}
    plan = restart(1, ((0, 6),), claims)
    assert plan.shares == {B: ((2, 4),), C: ((1, 2), (4, 6))}
    assert plan.without(9, [A, B, C], {A: 0.1}, {}).shares == {A: ((0, 1),), B: ((2, 4),), C: ((1, 2), (4, 6))}


def test_a_claim_of_another_batch_is_none() -> None:
    assert restart(2, ((6, 12),), {A: (1, ((0, 2),)), B: (1, ((5, 7),)), C: (1, ())}).shares == {}


# ---------------------------------------------------------------- OWN and TIE


def test_gradients_are_kept_and_extended_by_a_plan_that_only_adds() -> None:
    portion = Portion()
    portion.assign(1, 1, ((0, 2),))
    assert portion.next() == ((0, 1),)
    assert portion.add(1, ((0, 1),))
    assert portion.add(1, ((1, 2),))
    assert portion.next() == ()
    portion.assign(1, 2, ((0, 3),))
    assert (portion.kept, portion.next(), portion.dropped) == (((0, 2),), ((2, 3),), 0)
    assert portion.add(1, ((2, 3),))
    assert portion.kept == portion.units


def test_all_gradients_are_dropped_when_one_of_their_units_is_taken_away() -> None:
    portion = Portion()
    portion.assign(1, 1, ((0, 2),))
    assert portion.add(1, ((0, 1),))
    portion.assign(1, 2, ((1, 3),))
    assert (portion.kept, portion.next(), portion.dropped) == ((), ((1, 2),), 1)


def test_a_unit_that_is_taken_away_while_it_is_computed_is_left_out() -> None:
    portion = Portion()
    portion.assign(1, 1, ((0, 2),))
    portion.assign(1, 2, ((0, 1),))
    assert not portion.add(1, ((1, 2),))
    assert portion.add(1, ((0, 1),))
    assert not portion.add(1, ((0, 1),)), "and once is enough"


def test_gradients_belong_to_one_version() -> None:
    portion = Portion()
    portion.assign(1, 1, ((0, 2),))
    assert portion.add(1, ((0, 1),))
    portion.assign(2, 2, ((0, 4),))
    assert (portion.kept, portion.dropped) == ((), 1)
    assert not portion.add(1, ((1, 2),)), "computed with the parameters of before"


# ---------------------------------------------------------------- all of it


@dataclass
class Worker:
    """A replica that computes: its portion, and the sum that it stands for."""

    portion: Portion = field(default_factory=Portion)
    sum: list[int] = field(default_factory=list)
    at: int = 0
    inbox: deque[tuple[int, int, Ranges]] = field(default_factory=deque)
    here: bool = True
    computing: tuple[int, Ranges] | None = None
    at_once: int = 1

    def step(self) -> None:
        """Ends the unit under way and begins the next one, as a training loop does."""
        if self.computing is not None:
            belongs = self.portion.add(*self.computing)
            self.empty()
            if belongs:
                self.sum += one_by_one(self.computing[1])
        units = self.portion.next(self.at_once)
        self.computing = (self.portion.version, units) if units else None

    def empty(self) -> None:
        if self.at != self.portion.dropped:
            self.at, self.sum = self.portion.dropped, []


SAMPLES = Samples(samples=1000, batch_size=1, global_batch=7)


def walk(seed: int) -> int:
    """Plays at random; returns how many batches were committed. Every commit is its batch, each unit once."""
    chance = random.Random(seed)
    workers = {incarnation_id: Worker(at_once=1 + seed % 2) for incarnation_id in (A, B, C)}
    numbers, version, offers = iter(range(1, 10_000)), 1, dict[IncarnationId, tuple[int, Ranges, list[int]]]()

    def speeds() -> dict[IncarnationId, float]:
        return {incarnation_id: chance.choice([0.0, 0.1, 0.3]) for incarnation_id, x in workers.items() if x.here}

    def tell() -> None:
        for incarnation_id, x in workers.items():
            if x.here:
                x.inbox.append((version, plan.number, plan.share(incarnation_id)))

    plan = first_plan(next(numbers), version, batch(SAMPLES, version), speeds())
    tell()
    for _ in range(400):
        incarnation_id = chance.choice(list(workers))
        x = workers[incarnation_id]
        match chance.randrange(8):
            case 0 | 1:
                if x.inbox:
                    x.portion.assign(*x.inbox.popleft())
            case 2 | 3 | 4:
                x.step()
            case 5:
                x.empty()
                p = x.portion
                if x.here and p.version == version and p.plan == plan.number and p.kept == p.units:
                    offers[incarnation_id] = (p.plan, p.kept, list(x.sum))
            case 6:
                taken = {
                    incarnation_id: o
                    for incarnation_id, o in offers.items()
                    if workers[incarnation_id].here and o[0] == plan.number
                }
                if not plan.covers({incarnation_id: units for incarnation_id, (_, units, _) in taken.items()}):
                    continue
                if chance.random() < 0.5:
                    continue  # it was aborted
                summed = Counter(unit for _, _, units in taken.values() for unit in units)
                assert summed == Counter(one_by_one(batch(SAMPLES, version)))
                version, offers = version + 1, {}
                plan = first_plan(next(numbers), version, batch(SAMPLES, version), speeds())
                tell()
            case 7 if chance.random() < 0.4:
                x.here = not x.here
                x.inbox.clear()
                offers.pop(incarnation_id, None)
                present = [z for z in workers if workers[z].here]
                if present and plan.lost(present):
                    plan = plan.without(next(numbers), present, speeds(), {})
                tell()
    return version - 1


@pytest.mark.parametrize("seed", range(40))
def test_whichever_replicas_are_lost_or_late_each_commit_is_the_whole_batch_once(seed: int) -> None:
    assert walk(seed) >= 0


def test_batches_are_committed_in_most_of_these_walks() -> None:
    assert sum(walk(seed) > 0 for seed in range(40)) > 30


def _forgets_to_empty(self: Portion) -> None:
    self.kept = ()


def _covers_any_plan(self: BatchPlan, parts: dict[IncarnationId, Ranges]) -> bool:
    return len(parts) > 1


@pytest.mark.parametrize(
    ("owner", "name", "without"),
    [
        pytest.param(Portion, "drop", _forgets_to_empty, id="own"),
        pytest.param(BatchPlan, "covers", _covers_any_plan, id="cover"),
    ],
)
def test_the_walks_find_a_rule_that_is_left_out(
    owner: type, name: str, without: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, without)
    with pytest.raises(AssertionError):
        for seed in range(200):
            walk(seed)
