"""The sample ledger by itself: the coordinator's sets, and a replica's queue of units."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftopt.sync.protocol.intervals import Ranges, intersect, size, subtract, union
from ftopt.sync.protocol.ledger.ledger import MAX_HOLES, MAX_PARTS, STRIDE, Ledger
from ftopt.sync.protocol.ledger.unit_queue import UnitQueue
from ftopt.sync.protocol.messages import IncarnationId
from ftopt.sync.protocol.samples import Samples

ENDLESS = Samples(samples=100, batch_size=1)
A, B, C = ("a", 1), ("b", 1), ("c", 1)


def finite(units: int) -> Samples:
    return Samples(samples=units, batch_size=1, epochs=1)


def one_by_one(ranges: Ranges) -> list[int]:
    return [x for start, stop in ranges for x in range(start, stop)]


def test_units_are_granted_in_order_and_none_twice() -> None:
    ledger = Ledger(ENDLESS)
    assert ledger.grant([(A, 3), (B, 2)]) == {A: ((0, 3),), B: ((3, 5),)}
    assert ledger.grant([(A, 1)]) == {A: ((5, 6),)}
    assert ledger.leases == {A: ((0, 3), (5, 6)), B: ((3, 5),)}
    assert ledger.free() == ()


def test_only_gone_releases_and_what_is_released_is_granted_first() -> None:
    ledger = Ledger(ENDLESS)
    ledger.grant([(A, 3), (B, 2)])
    ledger.gone(A)
    assert ledger.free() == ((0, 3),)
    assert ledger.grant([(B, 5)]) == {B: ((0, 3), (5, 7))}


def test_an_undecided_attempt_holds_what_its_dead_member_has_used() -> None:
    ledger = Ledger(ENDLESS)
    ledger.grant([(A, 3), (B, 2)])
    ledger.hold(((0, 2), (3, 4)))
    ledger.gone(A)
    assert ledger.free() == ((2, 3),)
    ledger.commit(((0, 2), (3, 4)))
    assert ledger.free() == ((2, 3),)
    assert ledger.leases[B] == ((4, 5),)


def test_an_abort_frees_what_a_dead_member_has_used() -> None:
    ledger = Ledger(ENDLESS)
    ledger.grant([(A, 3)])
    ledger.hold(((0, 2),))
    ledger.gone(A)
    ledger.release()
    assert ledger.free() == ((0, 3),)


def test_a_claim_is_all_that_its_owner_holds() -> None:
    ledger = Ledger(ENDLESS)
    ledger.grant([(A, 3), (B, 2)])
    assert ledger.claim(A, ((0, 1),)) == ()  # the rest was lost with its connection
    assert ledger.free() == ((1, 3),)
    assert ledger.claim(B, ((0, 1), (3, 5))) == ((0, 1),)  # held twice: the steps are kept, and an event says so
    assert ledger.leases[A] == ((0, 1),)


def test_in_limbo_nothing_below_the_cursor_is_granted() -> None:
    ledger = Ledger(ENDLESS)
    ledger.open(((0, 4),), 10, [A, B])
    ledger.claim(A, ((4, 6),))
    assert ledger.grant([(A, 2)]) == {A: ((10, 12),)}
    ledger.claim(B, ())
    assert ledger.grant([(A, 20)]) == {A: ((6, 10), (12, 28))}


def test_limbo_ends_also_when_the_last_one_is_gone() -> None:
    ledger = Ledger(ENDLESS)
    ledger.open((), 10, [A, ("b", 2)])
    ledger.gone(A)
    ledger.gone(("b", 3))  # and all before it
    assert ledger.grant([(C, 4)]) == {C: ((0, 4),)}


def test_the_cursor_is_promised_in_strides_and_a_restart_goes_on_at_their_end() -> None:
    ledger = Ledger(ENDLESS)
    ledger.grant([(A, 3)])
    assert ledger.promise()
    assert ledger.promised == 3 + STRIDE
    ledger.grant([(A, STRIDE)])
    assert not ledger.promise()
    ledger.grant([(A, 10_000)])
    assert ledger.promise()
    again = Ledger(ENDLESS)
    again.open((), ledger.promised, [A])
    assert again.grant([(B, 1)]) == {B: ((ledger.promised, ledger.promised + 1),)}


def test_near_the_end_nobody_takes_more_than_its_share() -> None:
    ledger = Ledger(finite(10))
    assert ledger.grant([(A, 8)], shares=2) == {A: ((0, 5),)}
    assert ledger.grant([(A, 8), (B, 8)], shares=2) == {A: ((5, 8),), B: ((8, 10),)}
    assert ledger.grant([(A, 1)], shares=2) == {}
    ledger.commit(((0, 10),))
    assert ledger.ended


def test_a_lease_and_the_holes_in_what_is_done_stay_few() -> None:
    ledger = Ledger(ENDLESS)
    ledger.claim(A, tuple((4 * x, 4 * x + 1) for x in range(MAX_PARTS)))
    assert ledger.grant([(A, 1)]) == {}
    ledger.open(tuple((2 * x, 2 * x + 1) for x in range(MAX_HOLES + 1)), 0, [A])
    assert ledger.grant([(B, 1)]) == {}
    ledger.gone(A)
    assert ledger.grant([(B, 2)]) == {B: ((1, 2), (3, 4))}


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.none() | st.integers(30, 200))
def test_whatever_happens_each_unit_is_done_once_or_leased_or_free(seed: int, units: int | None) -> None:
    chance = random.Random(seed)
    ledger = Ledger(ENDLESS if units is None else finite(units))
    lives = dict.fromkeys("abcd", 1)
    incarnation_ids = [(name, 1) for name in lives]
    for incarnation_id in incarnation_ids:
        ledger.claim(incarnation_id, ())
    for _ in range(60):
        at = chance.randrange(len(incarnation_ids))
        incarnation_id = incarnation_ids[at]
        match chance.randrange(5):
            case 0 | 1:
                before = union(*ledger.leases.values(), ledger.done, ledger.under_way)
                granted = ledger.grant([(incarnation_id, chance.randrange(1, 12))], shares=chance.randrange(1, 5))
                for ranges in granted.values():
                    assert not intersect(ranges, before)
            case 2:
                used = [_some(chance, ledger.leases.get(x, ())) for x in incarnation_ids]
                ledger.hold(union(*used))
                if chance.random() < 0.5:
                    _bury(ledger, incarnation_ids, chance.randrange(len(incarnation_ids)))
                if chance.random() < 0.7:
                    ledger.commit(ledger.under_way)
                else:
                    ledger.release()
            case 3:
                _bury(ledger, incarnation_ids, at)
            case 4:
                ledger.claim(incarnation_id, _some(chance, ledger.leases.get(incarnation_id, ())))
        sets = [ledger.done, ledger.free(), *ledger.leases.values()]
        assert union(*sets) == (((0, ledger.cursor),) if ledger.cursor else ())
        assert sum(map(size, sets)) == ledger.cursor
    for incarnation_id in incarnation_ids:  # and in the end all of them are
        ledger.gone(incarnation_id)
    if units is not None:
        while granted := ledger.grant([(("z", 1), 50)]):
            ledger.commit(granted[("z", 1)])
        assert ledger.ended


def _bury(ledger: Ledger, incarnation_ids: list[IncarnationId], at: int) -> None:
    """One is gone, and its successor comes."""
    ledger.gone(incarnation_ids[at])
    incarnation_ids[at] = (incarnation_ids[at][0], incarnation_ids[at][1] + 1)
    ledger.claim(incarnation_ids[at], ())


def _some(chance: random.Random, ranges: Ranges) -> Ranges:
    return union((x, x + 1) for x in one_by_one(ranges) if chance.random() < 0.6)


# ---------------------------------------------------------------- a replica's unit queue


def test_what_an_undone_step_used_is_drawn_again_and_no_contribution_holds_it() -> None:
    unit_queue = UnitQueue()
    unit_queue.grant(((0, 9),))
    for unit in range(6):
        assert unit_queue.take() == unit
        assert unit_queue.draw(unit)
        if unit % 2:
            unit_queue.use()
    assert unit_queue.offer() == ((0, 6),)
    unit_queue.unuse()
    assert (unit_queue.offer(), unit_queue.unused) == (((0, 4),), 2)
    unit_queue.unuse()  # one step back
    assert unit_queue.offer() == ((0, 4),)
    assert unit_queue.take() == 6
    assert unit_queue.draw(6)
    unit_queue.use()
    assert unit_queue.offer() == ((0, 7),)
    assert unit_queue.settle(((5, 7),), ()) == ((5, 7),)  # another replica has used them besides
    unit_queue.unuse()
    assert (unit_queue.offer(), unit_queue.unused) == (((0, 4),), 1)
    unit_queue.use()
    unit_queue.redo()
    unit_queue.unuse()
    assert (unit_queue.offer(), unit_queue.queued) == ((), 7)


def test_a_unit_goes_from_the_grant_to_the_commit() -> None:
    unit_queue = UnitQueue()
    unit_queue.grant(((7, 9), (3, 4)))
    assert [unit_queue.take() for _ in range(4)] == [7, 8, 3, None]
    assert unit_queue.unused == 3
    assert unit_queue.draw(7) and unit_queue.draw(8)
    assert unit_queue.offer() == ()
    unit_queue.use()
    assert unit_queue.offer() == ((7, 9),)
    assert unit_queue.draw(3)  # ahead of the snapshot, or behind it: the step says so
    assert unit_queue.offer() == ((7, 9),)
    assert unit_queue.settle(((0, 8),), ((7, 8),)) == ()
    assert unit_queue.offer() == ((8, 9),)


def test_steps_with_units_that_are_done_by_another_one_are_told_and_offer_them_no_more() -> None:
    unit_queue = UnitQueue()
    unit_queue.grant(((0, 4),))
    for unit in (unit_queue.take(), unit_queue.take(), unit_queue.take()):
        assert unit is not None and unit_queue.draw(unit)
    unit_queue.use()
    assert unit_queue.settle(((0, 2),), ((0, 1),)) == ((1, 2),)
    assert unit_queue.offer() == ((2, 3),)


def test_steps_that_are_void_are_done_again_first() -> None:
    unit_queue = UnitQueue()
    unit_queue.grant(((0, 4), (8, 9)))
    for unit in (unit_queue.take(), unit_queue.take()):
        assert unit is not None and unit_queue.draw(unit)
    unit_queue.use()
    unit_queue.redo()
    assert unit_queue.offer() == ()
    assert [unit_queue.take() for _ in range(5)] == [0, 1, 2, 3, 8]


def test_what_is_held_no_more_is_not_drawn() -> None:
    unit_queue = UnitQueue()
    unit_queue.grant(((0, 4),))
    assert unit_queue.take() == 0
    unit_queue.reset()
    assert not unit_queue.draw(0)
    assert unit_queue.queued == unit_queue.unused == 0
    unit_queue.grant(((4, 8),))
    assert unit_queue.take() == 4
    assert unit_queue.settle(((4, 6),), ()) == ()  # another one's steps have used them, too
    assert not unit_queue.draw(4)
    assert unit_queue.take() == 6


@pytest.mark.parametrize("seed", range(20))
def test_the_stock_keeps_what_it_has_not_used(seed: int) -> None:
    chance = random.Random(seed)
    unit_queue, granted, done, taken = UnitQueue(), (), (), list[int]()
    for _ in range(100):
        match chance.randrange(5):
            case 0:
                start = granted[-1][1] + chance.randrange(2) if granted else 0
                unit_queue.grant(((start, start + 3),))
                granted = union(granted, ((start, start + 3),))
            case 1 | 2:
                if (unit := unit_queue.take()) is not None:
                    taken.append(unit)
            case 3:
                if taken:
                    assert unit_queue.draw(taken.pop(0))
                unit_queue.use()
            case 4 if chance.random() < 0.3:
                done = union(done, unit_queue.offer())
                assert unit_queue.settle(done, unit_queue.offer()) == ()
        left = unit_queue.queued + unit_queue.unused + size(unit_queue.offer())
        assert left == size(subtract(granted, done))
