"""What a rank of an island does when its threads, or its ranks, are not at the same place."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ftopt.optimizer.ranks.saved_slices import Whole
from ftopt.optimizer.ranks.slices import Cut
from ftopt.optimizer.ranks.worker import Worker
from ftopt.step.outer.step import OuterStep
from ftopt.sync.group import Change, Work

SHAPE = (40_000,)


class Island:
    """Two ranks on threads, as far as slices need it."""

    size = 2

    def __init__(self, rank: int, boxes: list[list[queue.SimpleQueue[Any]]]) -> None:
        self.rank, self.leads, self._boxes = rank, rank == 0, boxes

    def send(self, what: Any, rank: int) -> None:
        """To another rank."""
        self._boxes[self.rank][rank].put(what)

    def receive(self, into: Tensor, rank: int) -> None:
        """As sent next."""
        into.copy_(self._next(rank))

    def gather(self, what: Any) -> list[Any]:
        """On rank 0."""
        if self.rank:
            self.send(what, 0)
            return []
        return [what, self._next(1)]

    def share(self, what: Any) -> Any:
        """What rank 0 gives."""
        if self.rank:
            return self._next(0)
        self.send(what, 1)
        return what

    def _next(self, rank: int) -> Any:
        return self._boxes[rank][self.rank].get(timeout=30.0)


def on_both(work: Callable[[Island], Any]) -> list[Any]:
    """What ``work`` gives on both ranks."""
    boxes = [[queue.SimpleQueue[Any]() for _ in range(2)] for _ in range(2)]
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = work(Island(rank, boxes))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_residual_that_one_rank_lacks_is_saved_as_zeros_there(lacks: int) -> None:
    cut = Cut.of({"w": torch.zeros(SHAPE)}, ["w"], 2)

    def save(island: Island) -> Any:
        start, stop = cut.bounds[island.rank]
        left = {"own": torch.full((stop - start,), 2.0), "first": 1, "owed": torch.full((3,), 5.0)}
        part = {"params": torch.full((stop - start,), 7.0), "snapshot": None, "direction": None}
        part["residuals"] = {} if island.rank == lacks else {"": left}  # type: ignore[assignment]
        return Whole(island, [cut.bounds], torch.empty).work(0, part)  # type: ignore[arg-type]

    whole, _ = on_both(save)
    assert torch.equal(whole["params"], torch.full(SHAPE, 7.0))
    start, stop = cut.bounds[1 - lacks]
    own, owed = torch.zeros(SHAPE), torch.zeros(SHAPE)
    own[start:stop], owed[start + 1 : start + 4] = 2.0, 5.0
    assert torch.equal(whole["residuals"][""]["own"], own) and torch.equal(whole["residuals"][""]["owed"], owed)


class Links:
    """Of a rank that nobody answers."""

    rank = 0

    @contextmanager
    def within(self, *scope: object) -> Iterator[None]:
        """Nothing."""
        yield

    def forget(self, *scope: object) -> None:
        """Nothing."""


class Lanes:
    """Lanes that hang until they are stopped."""

    sent_bytes = received_bytes = 0

    def __init__(self) -> None:
        self.begun, self.stopped = threading.Event(), threading.Event()

    def stop(self) -> None:
        """From any thread."""
        self.stopped.set()


def reduction(lanes: Lanes) -> Any:
    """A host whose reductions hang with their lanes."""

    def reduce(attempt: Any, collective: Any) -> Any:
        lanes.begun.set()
        assert lanes.stopped.wait(30.0)
        raise InterruptedError("stopped")

    return SimpleNamespace(reduce=reduce)


def test_a_reduction_is_stopped_also_while_a_state_is_being_fetched() -> None:
    lanes = Lanes()
    fragment = SimpleNamespace(view=SimpleNamespace(sliced=True))
    worker = Worker(Links(), reduction(lanes), [fragment, fragment])  # type: ignore[arg-type]
    first, second = Work(1, 0, 1, "reduce"), Work(2, 1, 1, "install")
    attempt: Any = SimpleNamespace(rank=0, size=2, fragment=0)
    outcomes = queue.SimpleQueue[Any]()

    def part() -> tuple[str, float]:
        found = worker.reduce(first, attempt, None, lanes)
        return found.digest, found.peak

    thread = threading.Thread(target=lambda: outcomes.put(worker.do(first, part)))
    thread.start()
    assert lanes.begun.wait(30.0)
    assert worker.do(second, lambda: ("digest", 0.0)).digest == "digest"  # on another thread of rank 0
    worker.halt(2)
    assert not lanes.stopped.is_set()
    worker.halt(1)
    assert outcomes.get(timeout=30.0).failure == "InterruptedError"
    thread.join(30.0)


def test_a_part_that_a_rank_begins_too_late_is_not_done_and_ends_nothing() -> None:
    worker = Worker(Links(), reduction(Lanes()), [None])  # type: ignore[arg-type]
    worker.hear(Change(1, 0, "exclude"), ("out of line", True))
    outcome = worker.do(Work(1, 0, 1, "reduce"), lambda: ("never", 0.0))
    assert (outcome.failure, outcome.digest) == ("InterruptedError", "")


def test_the_pieces_of_a_state_that_is_not_checked_are_let_go() -> None:
    worker = Worker(Links(), reduction(Lanes()), [None])  # type: ignore[arg-type]
    worker.keep(1, "anchor", 0, 4, torch.zeros(4))
    worker.halt(1)
    assert worker.do(Work(1, 0, 1, "install"), lambda: ("never", 0.0)).failure == "InterruptedError"
    assert not worker._pieces


def test_units_that_rank_0_alone_knows_of_are_offered_by_all_ranks() -> None:
    proposed = list[Any]()
    group = SimpleNamespace(units=None, outstanding=lambda index: False, called_in=lambda index: False)
    freezer = SimpleNamespace(propose=lambda fragment, lr, waits: proposed.append(fragment))
    step: Any = SimpleNamespace(_group=group, freezer=freezer)
    view = SimpleNamespace(together=lambda value: [True, value])  # rank 0 has some
    fragment: Any = SimpleNamespace(index=0, carries_over=True, pending_steps=0, view=view)
    assert OuterStep._propose_pending(step, fragment, 0.1, spent=True)
    assert proposed == [fragment]
