"""A share of a global batch alone: what is in the sum is what the share says, whenever plans come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from ftopt.errors import UserError
from ftopt.sync.protocol.intervals import Ranges, size
from ftopt.sync.protocol.messages import Plan
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.replica.global_batch import GlobalBatch

SAMPLES = Samples(samples=48, batch_size=1, global_batch=6)


class Sum:
    """The optimizer: the sum is the list of its units."""

    def __init__(self) -> None:
        self.version = 1
        self.whole = self.outstanding = False
        self.sum: list[int] = []
        self.offered: list[tuple[int, Ranges, int, list[int]]] = []
        self.out: list[tuple[Ranges, str]] = []
        self.has_gradients = True
        self.when_offered: Callable[[], None] = lambda: None

    def catch_up(self) -> None:
        self.version, self.whole = self.version + 1, False

    def clear(self) -> None: ...

    def add(self, units: Ranges, samples: int, *, mine: bool) -> bool:
        if mine and self.has_gradients:
            self.sum += [unit for start, stop in units for unit in range(start, stop)]
        return mine and self.has_gradients

    def left_out(self, units: Ranges, samples: int, *, reason: str) -> None:
        self.out.append((units, reason))

    def empty(self) -> None:
        self.sum = []

    def offer(self, plan: int, units: Ranges, samples: int) -> None:
        self.offered.append((plan, units, samples, sorted(self.sum)))
        self.when_offered()

    def show(self) -> None: ...

    def at_rest(self) -> AbstractContextManager[None]:
        return nullcontext()

    def report(self, state: str, *, unit_s: float) -> None: ...


class Between:
    """The lock of a share; ``then`` is done once, as soon as it is free."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.then: Callable[[], None] | None = None

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)
        then, self.then = self.then, None
        if then is not None:
            then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def share(**settings: Any) -> tuple[GlobalBatch, Sum]:
    batch, computes = GlobalBatch(SAMPLES, **settings), Sum()
    batch.attend(computes)
    return batch, computes


def to_the_end(batch: GlobalBatch, computes: Sum) -> list[int]:
    """Computes what there is to compute, until the batch is whole with the first offer."""

    def whole() -> None:
        computes.whole = True

    computes.when_offered = whole
    sizes: list[int] = []
    while (units := batch.next()) is not None:
        sizes.append(size(units))
    return sizes


def test_a_plan_that_comes_as_a_unit_ends_leaves_nothing_twice_in_the_sum() -> None:
    """Between the account and the sum: the share goes to another replica, and comes back."""
    batch, computes = share()
    between = batch._changed = Between(batch._changed)  # type: ignore[assignment]
    batch.assign(Plan(1, 1, ((0, 2),), False))
    assert batch.next() == ((0, 1),)

    def given_and_taken() -> None:
        batch.assign(Plan(1, 2, (), False))
        batch.assign(Plan(1, 3, ((0, 2),), False))

    between.then = given_and_taken
    to_the_end(batch, computes)
    assert [each[3] for each in computes.offered] == [[0, 1]]


def test_units_are_computed_at_once_as_many_as_fit() -> None:
    batch, computes = share(at_once=2)
    batch.assign(Plan(1, 1, ((0, 3), (5, 6)), False))
    assert to_the_end(batch, computes) == [2, 2]
    assert computes.offered == [(1, ((0, 3), (5, 6)), 4, [0, 1, 2, 5])]


def test_units_that_are_another_s_in_part_are_computed_anew() -> None:
    batch, computes = share(at_once=2)
    batch.assign(Plan(1, 1, ((0, 2),), False))
    assert batch.next() == ((0, 2),)
    batch.assign(Plan(1, 2, (), False))
    batch.assign(Plan(1, 3, ((1, 2),), False))
    assert to_the_end(batch, computes) == [1]
    assert computes.offered == [(3, ((1, 2),), 1, [1])]


def test_what_has_no_gradients_is_left_out_of_the_weight() -> None:
    batch, computes = share()
    batch.assign(Plan(1, 1, ((0, 2),), False))
    batch.next()
    computes.has_gradients = False
    batch.next()
    computes.has_gradients = True
    to_the_end(batch, computes)
    assert computes.offered == [(1, ((0, 2),), 1, [1])]
    assert computes.out == [(((0, 1),), "no parameter has a gradient")]


def test_a_sum_that_is_given_up_forgets_what_was_left_out_of_it() -> None:
    batch, computes = share()
    batch.assign(Plan(1, 1, ((0, 1),), False))
    batch.next()
    computes.has_gradients = False
    computes.when_offered = lambda: batch.assign(Plan(1, 2, ((1, 2),), False))
    assert batch.next() == ((1, 2),)
    computes.has_gradients = True
    to_the_end(batch, computes)
    assert computes.offered == [(1, ((0, 1),), 0, []), (2, ((1, 2),), 1, [1])]


def test_what_the_loop_leaves_is_computed_once_more_and_then_left_out() -> None:
    batch, computes = share()
    batch.assign(Plan(1, 1, ((0, 2),), False))
    for _ in range(2):
        assert batch.more()
        assert batch.next() == ((0, 1),)
    assert batch.more()
    to_the_end(batch, computes)
    assert computes.offered == [(1, ((0, 2),), 1, [1])]
    assert [units for units, _ in computes.out] == [((0, 1),)]


def test_what_could_not_be_loaded_is_not_counted_as_computed() -> None:
    batch, computes = share()
    batch.assign(Plan(1, 1, ((0, 2),), False))
    assert batch.next() == ((0, 1),)
    batch.put_back()
    assert to_the_end(batch, computes) == [1, 1]
    assert computes.offered == [(1, ((0, 2),), 2, [0, 1])]


def test_an_exception_as_gradients_are_added_voids_the_sum_and_loses_nothing() -> None:
    batch, computes = share()
    batch.assign(Plan(1, 1, ((0, 2),), False))
    batch.next()
    batch.next()

    def half(units: Ranges, samples: int, *, mine: bool) -> bool:
        computes.sum.append(units[0][0])
        raise MemoryError

    add, computes.add = computes.add, half  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        batch.next()
    computes.add = add  # type: ignore[method-assign]
    to_the_end(batch, computes)
    assert [each[3] for each in computes.offered] == [[0, 1]]


def test_the_next_batch_is_refused_before_the_step_of_this_one() -> None:
    batch, computes = share()
    batch.assign(Plan(1, 1, ((0, 2),), False))
    to_the_end(batch, computes)
    with pytest.raises(UserError, match=r"call optimizer.step\(\)"):
        batch.more()


def test_a_batch_that_others_have_made_whole_after_the_loop_left_it_is_over() -> None:
    batch, computes = share()
    batch.assign(Plan(1, 1, ((0, 2),), False))
    batch.next()
    computes.whole = True
    batch.assign(Plan(2, 2, ((6, 8),), False))
    assert batch.more()
    assert (computes.version, batch.next()) == (2, ((6, 7),))
