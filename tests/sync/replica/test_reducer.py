"""The reducer thread alone: what it keeps of attempts that are over."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ftopt.sync.group import AttemptView, Collective, Host, Reduced
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as p
from ftopt.sync.replica.reducer import Reducer
from ftopt.transport.interface import StoreOps


class Alone:
    """A process group of one; also whatever else the reducer needs."""

    rank, size, sent_bytes, received_bytes, replica = 0, 1, 0, 0, "r0"

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def connect(self, *, key: str, rank: int, size: int, ops: StoreOps) -> Collective:
        return self

    def all_reduce_(self, flat: Tensor, summed: Any = None) -> None: ...

    def tell(self, row: Sequence[int]) -> None: ...

    def told(self) -> list[list[int]]:
        return [[0, 0]]

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]

    def stop(self) -> None: ...

    def close(self) -> None: ...

    @property
    def host(self) -> Host:
        return self  # type: ignore[return-value]

    def reduce(self, attempt: AttemptView, collective: Collective) -> Reduced:
        return Reduced("digest")

    def act(self, event: Callable[[Any], Any]) -> None:
        event(self)

    def reduced(self, fragment: int, attempt: int, digest: str, rows: list[list[int]], **_: Any) -> None:
        self.heard.put(("reduced", attempt))

    def reduce_failed(self, fragment: int, attempt: int, *, reason: str, peer: str, cause: str) -> None:
        self.heard.put(("failed", attempt))

    def send(self, message: m.FromReplica) -> None: ...

    def emit(self, event: str, **_: Any) -> None: ...


def start_reduce(attempt: int, fragment: int = 0) -> p.StartReduce:
    quorum = m.Quorum(
        fragment,
        version=1,
        attempt=attempt,
        group=attempt,
        rank=0,
        size=1,
        last_step=4,
        total_weight=4.0,
        contributors=1,
        advance=4,
        joined=(("r0", 1),),
        left=(),
        drop=(),
    )
    contribution = m.Contribution(fragment, 0, steps=4, last_step=4, weight=4.0)
    return p.StartReduce(quorum, (("r0", 1),), contribution)


def test_attempts_that_are_over_leave_nothing_behind() -> None:
    alone = Alone()
    reducer = Reducer(alone, alone)  # type: ignore[arg-type]
    reducer.start()
    for attempt in range(1, 51):
        reducer.begin(start_reduce(attempt, attempt % 2), 4 * attempt)
        assert alone.heard.get(timeout=30.0) == ("reduced", attempt)
        reducer.abort(attempt)  # too late, as when another member has failed
    reducer.stop()
    assert len(reducer._aborted) <= 2, "one a fragment"
    assert len(reducer._attempts) <= 2
    assert not reducer._users


def test_an_attempt_that_is_aborted_while_it_waits_for_its_turn_is_not_reduced() -> None:
    alone = Alone()
    reducer = Reducer(alone, alone)  # type: ignore[arg-type]
    reducer.begin(start_reduce(1), 4)
    reducer.abort(1)
    reducer.begin(start_reduce(2, 1), 4)
    reducer.start()
    assert alone.heard.get(timeout=30.0) == ("failed", 1)
    assert alone.heard.get(timeout=30.0) == ("reduced", 2)
    reducer.stop()
