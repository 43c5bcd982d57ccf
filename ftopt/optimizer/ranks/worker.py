"""The work on one rank's slice: its part of reductions and of fetched states, and its changes.

Three threads use it. Rank 0's messages arrive on the *link's* thread. The *worker* does one work after the other: a
separate thread on ranks other than 0; on rank 0 the threads that do it for any replica
(`ftopt.optimizer.ranks.host`). The *training* thread lets changes take effect.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftopt.errors import FtoptError
from ftopt.optimizer.ranks.slice_collective import RelayedStore, SliceCollective
from ftopt.optimizer.ranks.slices import SliceView
from ftopt.step.outer.reduction import Reduction
from ftopt.step.outer.state import CommittedState
from ftopt.sync.group import (
    AttemptView,
    Change,
    Collective,
    Committed,
    Damaged,
    Implausible,
    Outcome,
    OutOfStep,
    Rank,
    RankLinks,
    Reduced,
    Work,
)

_log = logging.getLogger(__name__)

FAILURES: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        Damaged, Implausible, InterruptedError, ConnectionError, TimeoutError, FloatingPointError, ValueError,
    )
}  # fmt: skip
"""Failures after which a repetition may succeed; any other ends the island."""
_LOOK_S = 1.0
_KEPT = 64
"""Number of later works after which a stop is forgotten; at most a few are under way."""


@dataclass(frozen=True)
class Attempted:
    """An attempt's data for a rank. ``parts``: slices of each member."""

    attempt: AttemptView
    key: str
    parts: list[int]


@dataclass(frozen=True)
class Fetched:
    """A fetched state's data for a rank, which has received the pieces before."""

    committed: Committed
    digest: str


class Worker:
    """This rank's slice.

    Args:
        reduction: the slice's host.
        transport: on ranks other than 0, connects their lanes.
    """

    def __init__(self, links: RankLinks, reduction: Reduction, fragments: list[Any], transport: Any = None) -> None:
        self.links, self.reduction, self.fragments = links, reduction, fragments
        self.machine = Rank(len(fragments))
        self._transport, self.store = transport, RelayedStore(links)
        self._changed = threading.Condition()
        self._payloads: dict[int, Any] = {}
        self._pieces: dict[int, dict[str, Tensor]] = {}
        self._checked: dict[int, CommittedState] = {}
        self._lanes: dict[int, tuple[str, Any]] = {}
        self._running: dict[int, Any] = {}  # the lanes of reductions under way
        self._stopped: set[int] = set()
        self._error: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Work, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ftopt-slice", daemon=True)

    # On ranks other than 0.

    def start(self) -> None:
        """Starts to do rank 0's works."""
        self._thread.start()

    def end(self) -> None:
        """Ends the work under way."""
        self._jobs.put(None)
        for _, lanes in list(self._lanes.values()):
            lanes.close()

    def heard(self, rank: int, what: Any) -> None:
        """Handles a message from rank 0. Its link's thread."""
        match what:
            case ("work", work, how):
                self._jobs.put((work, how))
            case ("halt", number):
                self.halt(number)
            case ("change", change, payload):
                self.hear(change, payload)
            case ("discard", fragment):
                self.discard(fragment)
            case ("piece", number, name, start, size, piece):
                self.keep(number, name, start, size, piece)
            case ("read", number, fragment, digest, name, start, stop):
                threading.Thread(
                    target=self._answer, args=(number, fragment, digest, name, start, stop), daemon=True
                ).start()
            case ("got", number, found):
                self.store.answered(number, found)

    def _answer(self, number: int, fragment: int, digest: str, name: str, start: int, stop: int) -> None:
        try:
            found: Any = self.read(fragment, digest, name)[start:stop].clone()
        except LookupError as error:
            found = error
        try:
            self.links.send(0, ("data", number, found))
        except FtoptError:
            return

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, how = job
            try:
                outcome = self.do(work, partial(self._by_lanes, work, how))
                self.links.send(0, ("outcome", outcome))
            except BaseException as error:
                self.fail(error)

    def _by_lanes(self, work: Work, how: Any) -> tuple[str, float]:
        if isinstance(how, Fetched):
            return self.check(work, how)
        attempt, fragment = how.attempt, how.attempt.fragment
        try:
            lanes = None if self.fragments[fragment].view.elsewhere else self._lanes_of(how)
            reduced = self.reduce(work, attempt, None, lanes)
            return reduced.digest, reduced.peak
        except BaseException:
            _, lanes = self._lanes.pop(fragment, (None, None))
            if lanes is not None:
                lanes.close()
            raise

    def _lanes_of(self, how: Attempted) -> Any:
        attempt = how.attempt
        key, lanes = self._lanes.get(attempt.fragment, ("", None))
        if key != how.key:
            if lanes is not None:
                lanes.close()
            view: SliceView = self.fragments[attempt.fragment].view
            lanes = self._transport.lanes(
                view.cut.numel, how.parts, key=how.key, rank=attempt.rank, ops=self.store, index=self.links.rank
            )
            self._lanes[attempt.fragment] = how.key, lanes
        return lanes

    # On all ranks.

    def do(self, work: Work, part: Callable[[], tuple[str, float]]) -> Outcome:
        """Does this rank's part of a work; returns its outcome, also of a failure."""
        rank = self.links.rank
        self.links.forget("work", work.number - _KEPT)
        try:
            with self._changed:
                self.machine.begin(work)
                self._stopped = {number for number in self._stopped if number >= work.number - _KEPT}
            if work.number in self._stopped:
                raise InterruptedError("the attempt was stopped before it began")
            with self.links.within("work", work.number):
                digest, peak = part()
            with self._changed:
                self.machine.holds(work)
            return Outcome(work.number, rank, digest, peak=peak)
        except tuple(FAILURES.values()) as error:
            kind = next(name for name, each in FAILURES.items() if isinstance(error, each))
            peer = getattr(error, "rank", None)
            return Outcome(work.number, rank, failure=kind, reason=f"{error}"[:500], peer=-1 if peer is None else peer)
        except BaseException as error:
            _log.error("rank %d: its part of an outer step", rank, exc_info=error)
            return Outcome(work.number, rank, failure=type(error).__name__, reason=f"{error!r}"[:500])
        finally:
            self._running.pop(work.number, None)
            self._pieces.pop(work.number, None)

    def reduce(self, work: Work, attempt: AttemptView, main: Collective | None, lanes: Any) -> Reduced:
        """Does its part of a reduction. ``main``: rank 0's collective with the other members; ``lanes``: this slice's
        lanes, or ``main`` if it is the whole fragment."""
        collective: Any = main
        if self.fragments[attempt.fragment].view.sliced:
            collective = SliceCollective(main, attempt.rank, attempt.size, lanes, self.links)
        self._running[work.number] = lanes
        if work.number in self._stopped:
            raise InterruptedError("the attempt was stopped before it began")
        return self.reduction.reduce(attempt, collective)

    def check(self, work: Work, fetched: Fetched) -> tuple[str, float]:
        """Checks the pieces of a fetched state, and keeps it until it is installed."""
        fragment = self.fragments[work.fragment]
        pieces = self._pieces.pop(work.number, {})
        state = fragment.check(fetched.committed, fetched.digest, pieces, self.reduction.committed_memory)
        with self._changed:
            self._checked = {n: each for n, each in self._checked.items() if n in self.machine.held}
            self._checked[work.number] = state
        return state.digest, 0.0

    def keep(self, number: int, name: str, start: int, size: int, piece: Tensor) -> None:
        """Keeps a piece of this rank's slice of a fetched state; ``size``: -1 if the tensor is not a slice."""
        pieces = self._pieces.setdefault(number, {})
        if size < 0:
            pieces[name] = piece
            return
        if name not in pieces:
            pieces[name] = torch.empty(size, dtype=piece.dtype)
        pieces[name][start : start + piece.numel()] = piece

    def keep_all(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a whole fetched state."""
        self._pieces[number] = dict(tensors)

    def halt(self, number: int) -> None:
        """Stops a work of which another rank's part has failed."""
        with self._changed:
            self._stopped.add(number)
        if (lanes := self._running.get(number)) is not None:
            lanes.stop()

    def hear(self, change: Change, payload: Any) -> None:
        """Notes that a change has happened."""
        with self._changed:
            self._payloads[change.index] = payload
            self.machine.hear(change)
            self._changed.notify_all()

    def discard(self, fragment: int) -> None:
        """Notes that the last attempt has ended without a commit."""
        with self._changed:
            if self.machine.discard(fragment):
                self.reduction.discard(fragment)

    def read(self, fragment: int, digest: str, name: str) -> Tensor:
        """This rank's slice of the committed state with this digest. LookupError: it has been replaced."""
        state: CommittedState = self.fragments[fragment].state
        if state.digest != digest:
            raise LookupError("a newer state has taken effect")
        return state.tensors()[name]

    def release(self, word: int) -> None:
        """Lets the changes up to rank 0's word take effect. Training thread."""
        with self._changed:
            while not self.machine.has(word):
                self._look()
                self._changed.wait(_LOOK_S)
            for change in self.machine.take(word):
                self._let(change, self._payloads.pop(change.index))

    def _look(self) -> None:
        if self._error is not None:
            raise FtoptError(f"rank {self.links.rank}: its part of the outer step failed") from self._error
        self.links.check()

    def _let(self, change: Change, payload: Any) -> None:
        fragment = self.fragments[change.fragment]
        match change.kind:
            case "commit":
                attempt, committed = payload
                missing = fragment.result is None or fragment.result.made.attempt != attempt.attempt
                if missing and fragment.state.meta.version < committed.version:  # else a fetched state has overtaken it
                    raise OutOfStep(f"a commit of attempt {attempt.attempt}, whose result is not here")
                self.reduction.commit(attempt, committed)
            case "exclude":
                reason, void = payload
                self.reduction.exclude(change.fragment, reason, void=void)
            case "install":
                (reset,) = payload
                fragment.install(self._checked.pop(change.work), reset=reset)
            case "begin":
                committed, reset = payload
                fragment.begin(committed, reset=reset)

    def fail(self, error: BaseException) -> None:
        """Ends the island, since this rank cannot go on."""
        self._error = self._error or error
        _log.error("rank %d of an island: %s", self.links.rank, error, exc_info=error)
        self.links.close()
