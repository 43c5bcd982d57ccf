"""The `Host` of an island: rank 0's group calls it, and it passes each call on to all ranks."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from ftopt.errors import FtoptError
from ftopt.optimizer.ranks.slice_collective import relay_get
from ftopt.optimizer.ranks.slices import SliceView
from ftopt.optimizer.ranks.worker import FAILURES, Attempted, Fetched, Worker
from ftopt.step.outer.state import is_sliced
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import (
    AttemptView,
    Collective,
    Committed,
    Done,
    Leader,
    Outcome,
    Reduced,
    Stop,
    Work,
)

_PIECE = 1 << 20
"""Elements of a state sent to or from a rank at a time."""


class SliceHost:
    """Rank 0's `Host`.

    Args:
        worker: the worker of rank 0's own slice.
        whole: memory for whole tensors, in states that peers fetch.
    """

    def __init__(self, worker: Worker, size: int, whole: Memory) -> None:
        self._worker, self._links, self._whole = worker, worker.links, whole
        self._sliced = bool(worker.fragments[0].view.sliced)  # else rank 0 has all of each fragment
        self._leader = Leader(size)
        self._size = size
        self._lock = threading.RLock()
        self._under_way: dict[int, tuple[Work, queue.SimpleQueue[Done | BaseException]]] = {}
        self._attempts: dict[int, Work] = {}
        self._reads: dict[int, queue.SimpleQueue[Any]] = {}
        self._numbers = itertools.count()
        self._ops: Any = None
        self._lost: FtoptError | None = None

    # Messages from the other ranks. Their links' threads.

    def heard(self, rank: int, what: Any) -> None:
        """Handles a message from another rank."""
        match what:
            case ("outcome", outcome):
                self._ended(outcome)
            case ("set", key, value):
                with suppress(OSError):  # the coordinator is away; the rank that reads the key gets the error
                    self._ops.set(key, value)
            case ("get", number, key, timeout_s):
                relay_get(self._links, self._ops, rank, number, key, timeout_s)
            case ("data", number, found):
                if (box := self._reads.pop(number, None)) is not None:
                    box.put(found)

    def lost(self, error: FtoptError) -> None:
        """Ends all waits, since a rank is gone."""
        with self._lock:
            self._lost = error
            boxes = [box for _, box in self._under_way.values()] + list(self._reads.values())
        for box in boxes:
            box.put(error)

    def _ended(self, outcome: Outcome) -> None:
        stop = False
        with self._lock:
            entry = self._under_way.get(outcome.number)
            if entry is None:
                return
            for effect in self._leader.heard(outcome):
                if isinstance(effect, Stop):
                    stop = True
                else:
                    del self._under_way[outcome.number]
                    entry[1].put(effect)
        if stop:
            self._halt(outcome.number)

    def _halt(self, number: int) -> None:
        self._links.stop("work", number)
        with suppress(FtoptError):
            self._links.tell(("halt", number))
        self._worker.halt(number)

    # Work.

    def _begin(self, fragment: int, version: int, kind: Literal["reduce", "install"]) -> Work:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            work = self._leader.begin(fragment, version, kind)
            self._under_way[work.number] = work, queue.SimpleQueue()
        return work

    def _all(self, work: Work, box: queue.SimpleQueue[Any], part: Any) -> Done:
        """Does this rank's part, and waits for all. Raises the first failure."""
        own: list[BaseException] = []

        def kept() -> tuple[str, float]:
            try:
                found: tuple[str, float] = part()
                return found
            except BaseException as error:
                own.append(error)
                raise

        self._ended(self._worker.do(work, kept))
        done = box.get()
        if isinstance(done, BaseException):
            raise done
        assert isinstance(done, Done)
        if done.failed is None:
            return done
        failed = done.failed
        if failed.rank == 0 and own:
            raise own[0]
        kind = FAILURES.get(failed.failure, FtoptError)
        error = kind(f"rank {failed.rank}: {failed.reason}")
        if failed.peer >= 0:
            error.rank = failed.peer  # type: ignore[attr-defined]
        raise error

    # The `Host`.

    def standing(self) -> tuple[int, float]:
        return self._worker.reduction.standing()

    def counted(self) -> tuple[int, int, int, int]:
        return self._worker.reduction.counted()

    def reduce(self, attempt: AttemptView, collective: Collective) -> Reduced:
        """See `Host`. A result is prepared once all ranks have prepared it."""
        group: Any = collective
        key, parts, lanes = "", list[int](), group
        if self._sliced:
            self._ops, key, parts = group.ops, group.key, group.parts()
            lanes = group.lanes(self._view(attempt.fragment).cut.numel)
        work = self._begin(attempt.fragment, attempt.version, "reduce")
        with self._lock:
            self._attempts = {n: w for n, w in self._attempts.items() if w.fragment != attempt.fragment}
            self._attempts[attempt.attempt] = work
            box = self._under_way[work.number][1]
        self._links.tell(("work", work, Attempted(attempt, key, parts)))
        found: list[Reduced] = []

        def part() -> tuple[str, float]:
            found.append(own := self._worker.reduce(work, attempt, collective, lanes))
            return own.digest, own.peak

        done = self._all(work, box, part)
        return replace(found[0], digest=done.digest, peak=done.peak)

    def commit(self, attempt: AttemptView, committed: Committed) -> None:
        with self._lock:
            work = self._attempts.pop(attempt.attempt).number
            self._change(attempt.fragment, "commit", (attempt, committed), version=committed.version, work=work)

    def discard(self, fragment: int) -> None:
        with self._lock:
            self._leader.discard(fragment)
            under_way = [w.number for w, _ in self._under_way.values() if (w.fragment, w.kind) == (fragment, "reduce")]
        self._worker.discard(fragment)
        with suppress(FtoptError):  # its loss is known, and logged
            self._links.tell(("discard", fragment))
        for number in under_way:
            self._halt(number)

    def exclude(self, fragment: int, reason: str, *, void: bool) -> None:
        with self._lock:
            self._change(fragment, "exclude", (reason, void))

    def install(self, committed: Committed, digest: str, tensors: Mapping[str, Tensor], *, reset: bool) -> None:
        """See `Host`. Each rank gets its slice, and all check it together."""
        fragment, version = committed.fragment, committed.version
        if self._sliced:
            self._check_shapes(fragment, tensors)
        work = self._begin(fragment, version, "install")
        with self._lock:
            box = self._under_way[work.number][1]
        fetched = Fetched(committed, digest)
        for rank in range(self._size):
            if self._sliced:
                self._deal(work, rank, tensors)
            elif not rank:
                self._worker.keep_all(work.number, tensors)
            if rank:
                self._links.send(rank, ("work", work, fetched))
        self._all(work, box, lambda: self._worker.check(work, fetched))
        with self._lock:
            self._change(fragment, "install", (reset,), version=version, work=work.number)

    def _check_shapes(self, fragment: int, tensors: Mapping[str, Tensor]) -> None:
        held, numel = self._worker.fragments[fragment].state.tensors(), self._view(fragment).cut.numel
        expected = {name: ((numel,) if is_sliced(name, t) else tuple(t.shape), t.dtype) for name, t in held.items()}
        got = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        if expected != got:
            raise ValueError(f"the fetched state of fragment {fragment} does not fit the model: {got}, not {expected}")

    def _deal(self, work: Work, rank: int, tensors: Mapping[str, Tensor]) -> None:
        start, stop = self._view(work.fragment).cut.bounds[rank]

        def give(name: str, at: int, size: int, piece: Tensor) -> None:
            piece = piece.clone()  # else its whole storage would be pickled
            if rank:
                self._links.send(rank, ("piece", work.number, name, at, size, piece))
            else:
                self._worker.keep(work.number, name, at, size, piece)

        for name, tensor in tensors.items():
            if not is_sliced(name, tensor):
                give(name, 0, -1, tensor)
                continue
            for at in range(start, max(stop, start + 1), _PIECE):  # one piece even of an empty slice
                give(name, at - start, stop - start, tensor[at : min(stop, at + _PIECE)])

    def begin(self, committed: Committed, *, reset: bool) -> None:
        with self._lock:
            self._change(committed.fragment, "begin", (committed, reset), version=committed.version)

    def awaited(self, fragment: int) -> AbstractContextManager[None]:
        return nullcontext() if self._sliced else self._worker.reduction.awaited(fragment)

    def state(self, fragment: int) -> tuple[str, dict[str, Tensor]]:
        """See `Host`. The tensors are gathered when they are read, which raises LookupError if a change is deferred."""
        if not self._sliced:
            self._check_served(fragment)
            return self._worker.reduction.state(fragment)
        digest = self._worker.fragments[fragment].state.digest
        return digest, RemoteState(self, fragment, digest)  # type: ignore[return-value]

    def gathered(self, fragment: int, digest: str) -> dict[str, Tensor]:
        """Gathers the whole committed state of a fragment. LookupError: it has been replaced."""
        self._check_served(fragment)
        own, found = self._worker.fragments[fragment].state, dict[str, Tensor]()
        bounds = self._view(fragment).cut.bounds
        for name, tensor in own.tensors().items():
            if not is_sliced(name, tensor):
                found[name] = tensor
                continue
            found[name] = whole = self._whole.take(bounds[-1][1], tensor.device)
            for rank, (start, stop) in enumerate(bounds):
                for at in range(start, stop, _PIECE):
                    end = min(stop, at + _PIECE)
                    whole[at:end] = self._read(rank, fragment, digest, name, at - start, end - start)
        self._check_served(fragment)
        return found

    def _check_served(self, fragment: int) -> None:
        with self._lock:
            if self._leader.deferred(fragment):
                raise LookupError("a newer state takes effect at the next step boundary")

    def _read(self, rank: int, fragment: int, digest: str, name: str, start: int, stop: int) -> Tensor:
        if not rank:
            return self._worker.read(fragment, digest, name)[start:stop]
        number, box = next(self._numbers), queue.SimpleQueue[Any]()
        with self._lock:
            if self._lost is not None:
                raise LookupError(str(self._lost))
            self._reads[number] = box
        self._links.send(rank, ("read", number, fragment, digest, name, start, stop))
        found = box.get()
        if isinstance(found, BaseException):
            raise LookupError(str(found))
        assert isinstance(found, Tensor)
        return found

    # Changes.

    def _change(
        self,
        fragment: int,
        kind: Literal["commit", "install", "exclude", "begin"],
        payload: Any,
        *,
        version: int = 0,
        work: int = 0,
    ) -> None:
        """Announces a change. Under the lock, so that all ranks hear of changes in the same order."""
        change = self._leader.change(fragment, kind, version=version, work=work)
        self._worker.hear(change, payload)
        with suppress(FtoptError):  # its loss is known, and logged
            self._links.tell(("change", change, payload))

    def waits(self) -> bool:
        """Whether changes have happened that have not taken effect."""
        with self._lock:
            return self._leader.waits

    def word(self) -> int:
        """The number of changes that have happened."""
        with self._lock:
            return self._leader.changes

    def taken(self, word: int) -> None:
        """Notes that changes up to ``word`` have taken effect here."""
        with self._lock:
            self._leader.taken(word)

    def _view(self, fragment: int) -> SliceView:
        found: SliceView = self._worker.fragments[fragment].view
        return found


class RemoteState(Mapping[str, Tensor]):
    """An island's committed state, whose tensors are gathered when they are first read."""

    def __init__(self, host: SliceHost, fragment: int, digest: str) -> None:
        self._host, self._fragment, self._digest = host, fragment, digest
        self._found: dict[str, Tensor] | None = None

    def _there(self) -> dict[str, Tensor]:
        if self._found is None:
            self._found = self._host.gathered(self._fragment, self._digest)
        return self._found

    def __getitem__(self, name: str) -> Tensor:
        return self._there()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())
