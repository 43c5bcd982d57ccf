"""One Gloo process group that can be stopped at any moment, and dropped without waiting."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo, Work

from ftopt.errors import plain
from ftopt.transport.interface import StoreOps
from ftopt.transport.sockets import rank_of, shut_down, standing, unreachable
from ftopt.transport.store import PeerLost, RendezvousStore

_SLICE = timedelta(milliseconds=5)
_OPEN_MARGIN_S = 0.5
"""`open` waits this much longer than the store, whose TimeoutError names the missing rank."""

_LOOK_S = 0.5
"""Seconds between two checks of the connections while no piece is done: Gloo does not always wake a wait for a member
that has died."""
_PROBE_S = 0.5
"""Seconds that a member has to answer after a time-out, or the error names it."""
_WORD_S = _OPEN_MARGIN_S + 2 * _PROBE_S
"""Extra seconds before a member that reaches all others fails: members that are cut off name their peer first."""


class PeerSilent(TimeoutError):
    """Nothing moves, and the host of the member ``rank`` does not answer."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class GlooGroup:
    """The process group of one attempt; the blocking calls raise what `ftopt.transport.gloo.GlooCollective` says.

    Args:
        key: names the group.
        rank: this member's place.
        size: members.
        ops: the coordinator's store. Called on a background thread.
        options: Gloo's.
        timeout_s: seconds after which a call fails if no piece is done, or a peer does not connect.
        word: a number that the members exchange when they connect; None (on all of them): nothing is exchanged.

    Attributes:
        words: all members' numbers, in rank order, once the group is open.
    """

    def __init__(
        self, key: str, rank: int, size: int, ops: StoreOps, *, options: Any, timeout_s: float, word: int | None = None
    ) -> None:
        self._word = word
        self.words = [1 if word is None else word] * size
        self.rank = rank
        self.size = size
        self.told: deque[Work] = deque()
        """Works that outlast a call; dropped at the end, since a work keeps the group's connections."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards _group and _closed
        self._group: Any = None
        self._closed = False
        self._stopped = threading.Event()
        self._opened = threading.Event()  # built, failed to build, or stopped
        self._failure: BaseException | None = None
        self._countable = False  # each peer's connection was seen, so that the loss of one shows
        self._store = RendezvousStore(ops, key, timeout_s=timeout_s, stopped=self._stopped.is_set)
        if size == 1:
            self._opened.set()
        else:
            in_background(lambda: self._build(options), f"ftopt-connect-{key}")

    def open(self) -> None:
        """Waits until all members are connected; afterwards it costs nothing."""
        built = self._opened.wait(self._timeout_s + _OPEN_MARGIN_S)
        self.check()
        failure, self._failure = self._failure, None
        try:
            if not built:
                failure = self._blame(f"a peer came to the group but did not connect within {self._timeout_s:g} s")
            elif isinstance(failure, TimeoutError):
                failure = self._blame(str(failure))
            if failure is not None:
                self.close()
                raise failure
        finally:
            failure = None  # its traceback holds this frame, and so the collective

    def stop(self) -> None:
        """Ends a call in progress within milliseconds, `open` too; later calls raise InterruptedError."""
        self._stopped.set()
        self._opened.set()

    def close(self) -> None:
        """Drops the group without blocking, also when a peer hangs. Idempotent; includes `stop`."""
        self.stop()  # first: a reduction that finds no group must find that it was stopped
        with self._lock:
            if self._closed:
                return
            self._closed = True
            box, self._group = [self._group], None
        self.told.clear()
        if self.size > 1:
            in_background(lambda: self._put_away(box), "ftopt-drop-group")

    @contextmanager
    def works(self) -> Iterator[tuple[list[Any], deque[Work]]]:
        """The group, in a box, and the works under way, oldest first; both are dropped if anything fails."""
        pending: deque[Work] = deque()
        with self._lock:
            box = [self._group]  # in a box: dropping the last reference to the group waits for its works
        try:
            self.check()
            yield box, pending
        except BaseException as error:
            pending.clear()  # a work keeps the group's connections
            self.close()
            in_background(box.clear, "ftopt-drop-group")
            if isinstance(error, RuntimeError):  # Gloo's own
                raise self._explain(error, "was lost in a reduction") from None
            raise

    def finish(self, pending: deque[Work], since_s: float) -> float:
        """Waits for the oldest piece; returns the time. (No local variable holds it: a traceback would keep it.)"""
        look_s = time.monotonic() + _LOOK_S
        while True:
            self.check()
            try:
                done = pending[0].is_completed()
                pending[0].wait(_SLICE)
                pending.popleft()
                return time.monotonic()
            except IndexError:  # a row under way when another thread closes the collective
                raise InterruptedError("the reduction was stopped") from None
            except RuntimeError as error:
                if done:  # then it is the work's own error, not the time-out of the slice
                    raise self._explain(error, "was lost in a reduction") from None
            now = time.monotonic()
            if now > look_s:
                look_s = now + _LOOK_S
                if self._has_lost_a_peer() and not self._ended(pending):
                    self.check()  # `close` may have ended the connections
                    raise PeerLost("a connection to a peer has ended, and Gloo has not told")
            if now - since_s > self._timeout_s:
                raise self._blame(
                    f"no piece was reduced for {self._timeout_s:g} s: a peer hangs or is cut off, or the "
                    "network is too slow for pieces of this size"
                )

    def _has_lost_a_peer(self) -> bool:
        found = standing(dict(self._store.values)) if self._countable else None
        return found is not None and found < self.size - 1

    def _ended(self, pending: deque[Work]) -> bool:
        """Whether the oldest work has ended meanwhile, or another thread has closed the group."""
        try:
            return pending[0].is_completed()
        except IndexError:
            return True

    def check(self) -> None:
        """Raises InterruptedError once the group is stopped."""
        if self._stopped.is_set():
            raise InterruptedError("the reduction was stopped")

    def _build(self, options: Any) -> None:
        group: Any = None
        try:
            group = cast(Any, ProcessGroupGloo)(self._store, self.rank, self.size, options)
            self._countable = (standing(dict(self._store.values)) or 0) >= self.size - 1
            if self._word is not None:
                own = torch.full((self.size,), self._word)
                words = torch.empty_like(own)
                group.alltoall_base(words, own, [], []).wait()
                self.words = words.tolist()
        except RuntimeError as error:
            self._failure = self._with_peer(self._explain(error, "could not be connected"))
        except BaseException as error:  # the store's own are named and typed already
            self._failure = _bare(error)
        with self._lock:
            if not self._closed:
                self._group = group
        self._opened.set()
        # A group that is built after close() is dropped here, on this daemon thread.

    def _with_peer(self, error: OSError) -> OSError:
        """Adds an unreachable member to an error that names none: if this host's interface is down, it fails at once,
        before the others have timed out."""
        if not isinstance(error, PeerLost) or error.rank is not None:
            return error
        silent = unreachable(dict(self._store.values), self.rank, _PROBE_S)
        if not silent:
            return error
        return PeerSilent(f"{error}; the host of rank {silent[0]} cannot be reached", rank=silent[0])

    def _blame(self, message: str) -> BaseException:
        """The error of a time-out; it names an unreachable member, or comes `_WORD_S` later if all can be reached."""
        silent = unreachable(dict(self._store.values), self.rank, _PROBE_S)
        if silent:
            return PeerSilent(f"{message}; the host of rank {silent[0]} does not answer", rank=silent[0])
        if self._stopped.wait(_WORD_S):
            return InterruptedError("the reduction was stopped")
        return TimeoutError(message)

    def _put_away(self, box: list[Any]) -> None:
        """Ends the connections and drops the group in ``box``, to which the caller holds no other reference."""
        shut_down(dict(self._store.values))
        box.clear()

    def _explain(self, error: RuntimeError, what: str) -> OSError:
        line = first_line(error)
        rank = rank_of(str(error), dict(self._store.values), self.rank)
        who = "a peer" if rank is None else f"rank {rank}"
        if "imed out" in line or "imeout" in line:
            return TimeoutError(f"{who} {what} in time: {line}")
        return PeerLost(f"{who} {what}: {line}", rank=rank)


def _bare(error: BaseException) -> BaseException:
    """The error without its traceback, whose frames would keep the group's listening port and Gloo's thread."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def first_line(error: BaseException) -> str:
    """Gloo's message without the place in its source, its advice and the full stop."""
    return plain(str(error).partition("\n")[0]).partition(" This is typically")[0].rstrip(".")


_EXIT_S = 3.0
_running: set[threading.Thread] = set()
_unstarted: list[Callable[[], None]] = []


def in_background(work: Callable[[], None], name: str) -> None:
    """Does ``work`` on a daemon thread of that name."""

    def run() -> None:
        try:
            work()
        finally:
            _running.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending and starts no threads; `work` is kept, with all that it holds
        _unstarted.append(work)


@atexit.register
def _finish_background() -> None:
    """Waits 3 s for threads in Gloo: one that returns while the interpreter ends would abort the process."""
    end_s = time.monotonic() + _EXIT_S
    for thread in list(_running):
        if thread.ident is not None:
            thread.join(max(0.0, end_s - time.monotonic()))
