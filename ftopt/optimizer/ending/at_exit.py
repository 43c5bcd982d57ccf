"""Leaves the job for scripts that end without `close`, and for optimizers that are dropped without it.

A script may end without ``close()`` or ``with optimizer:``. Then `at_exit` leaves for it, before the interpreter
forbids new work on threads, which the outer step needs; `atexit` would run too late. After an uncaught exception, in
the main thread or in the one that trains, it leaves without waiting, as ``with`` does. It cannot do so after
``sys.exit(1)`` outside ``with``, since Python has dropped the exit status. A forked child neither trains nor leaves:
the membership is its parent's, whose threads do not run there.

An optimizer that is collected without ``close()`` leaves, too, such as that of a notebook cell that is run again. A
separate thread contributes its steps. Its model may live on, and is not touched any more.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from ftopt.errors import FtoptError, JobFailed, UserError
from ftopt.optimizer.asked import left_s, signals

_log = logging.getLogger(__name__)

_PART_S = 10.0
_CHARS = 300
"""Maximum characters of an error in the others' logs."""
_BY_SIGNAL = 128
"""Exit statuses from this value on name a signal."""


class Leaver(Protocol):
    """An optimizer that has joined a job and not left it."""

    @property
    def trains(self) -> tuple[nn.Module | None, str]:
        """Its model and its replica's id."""

    def announce(self) -> None:
        """Announces to the job that this replica leaves."""

    def disown(self) -> None:
        """Gives up the membership in a forked child: `close` does nothing there, and a step is an error."""

    def close(self, *, flush: bool, timeout_s: float, early: bool) -> None: ...

    def unfinished(self) -> str:
        """The replica and its number of pending steps, as text; "": none."""

    def note_dropped(self) -> None:
        """Notes, within the collector, that user code drops it and may use the model freely."""

    def part_from_model(self) -> str:
        """Stops reading and changing the model. Returns why the pending steps cannot be handed in; "": they can be."""


class AtExit:
    """Leaves for scripts that end without doing so.

    Attributes:
        uncaught: the exception that has ended the main thread, while this object leaves.
    """

    def __init__(self) -> None:
        self.uncaught: BaseException | None = None
        self._open: dict[int, tuple[Callable[[], Leaver | None], threading.Thread]] = {}
        self._dropped: dict[int, _Dropped] = {}
        self._failed: set[threading.Thread] = set()
        self._leaving: list[Leaver] = []
        """At the end of the script, the leavers that have not begun to leave; they leave in turn."""
        self._process = 0
        self._claims, self._claim = dict[object, tuple[nn.Module, str]](), threading.Lock()
        """Models whose optimizers join now, with their replicas."""
        os.register_at_fork(after_in_child=self._disown)

    def _disown(self) -> None:
        self._claims, self._claim = {}, threading.Lock()
        for leaver, _ in self._living():
            leaver.disown()

    def _living(self) -> list[tuple[Leaver, threading.Thread]]:
        found = [(find(), thread) for find, thread in list(self._open.values())]
        return [(leaver, thread) for leaver, thread in found if leaver is not None]

    def add(self, leaver: Leaver, *, keep: bool = True) -> None:
        """Notes that ``leaver`` has joined, and trains on this thread. ``keep`` it alive until `remove`; else it
        reports when it is `dropped`."""
        if self._process != os.getpid():
            self._process, self._open, self._dropped, self._failed = os.getpid(), {}, {}, set()
            threading._register_atexit(self.leave)  # type: ignore[attr-defined]
            self._note_failed_threads()
        find: Callable[[], Leaver | None] = (lambda: leaver) if keep else weakref.ref(leaver)
        self._open[id(leaver)] = (find, threading.current_thread())

    def _note_failed_threads(self) -> None:
        """Notes threads that fail: by an exception, or an exit status other than 0."""
        tell = threading.excepthook

        def note(raised: threading.ExceptHookArgs) -> None:
            exits = isinstance(raised.exc_value, SystemExit) and raised.exc_value.code in (None, 0)
            if raised.thread is not None and not exits:
                self._failed.update(thread for _, thread in self._living() if thread is raised.thread)
            tell(raised)

        threading.excepthook = note

    def remove(self, leaver: Leaver) -> None:
        """Forgets ``leaver``, which has left or could not join."""
        self._open.pop(id(leaver), None)
        self._dropped.pop(id(leaver), None)

    def dropped(self, leaver: Leaver) -> None:
        """Makes ``leaver``, which is being collected, leave on a separate thread. Called on any thread, at any
        point."""
        if self._process != os.getpid() or (found := self._open.pop(id(leaver), None)) is None:
            return
        leaver.note_dropped()
        self._dropped[id(leaver)] = dropped = _Dropped(leaver, failed=found[1] in self._failed)
        try:
            dropped.start()
        except RuntimeError:  # the interpreter is ending
            self._dropped.pop(id(leaver), None)
            dropped.parted.set()
            dropped.ended.set()

    def check_alone(self, model: nn.Module) -> None:
        """Raises UserError if another optimizer of this process is in a job with parameters of this model, or joins one
        now. Waits for a dropped one to part from the model."""
        if self._who_trains(model) is not None:
            gc.collect()  # the optimizer may have been dropped
        if (replica := self._who_trains(model)) is not None:
            raise UserError(
                f"this model is trained as replica {replica!r} already, by an optimizer that has not left its job: "
                "each step would count twice; call close() of that optimizer first (in a notebook: run "
                "optimizer.close(), then this cell again), or give each replica a model of its own"
            )
        for dropped in list(self._dropped.values()):
            if self._process == os.getpid():
                dropped.parted.wait(_PART_S)

    @contextmanager
    def joining(self, model: nn.Module, replica: str) -> Iterator[None]:
        """Surrounds a join, until `add`: first checks as `check_alone` does, for one thread at a time, so that of two
        threads that join with one model only the first may."""
        key = object()
        with self._claim:
            self.check_alone(model)
            self._claims[key] = model, replica
        try:
            yield
        finally:
            self._claims.pop(key, None)

    def _who_trains(self, model: nn.Module) -> str | None:
        own = {id(parameter) for parameter in model.parameters()}
        there = self._living() if self._process == os.getpid() else []
        for other, replica in (*list(self._claims.values()), *(leaver.trains for leaver, _ in there)):
            if other is not None and any(id(parameter) in own for parameter in other.parameters()):
                return replica
        return None

    def await_dropped(self, replica: str) -> None:
        """Waits until a dropped optimizer of this replica has left, which the next one would supersede."""
        for dropped in list(self._dropped.values()):
            if self._process == os.getpid() and dropped.leaver.trains[1] == replica:
                dropped.ended.wait(left_s() + _PART_S)

    def beside(self, leaver: Leaver) -> list[str]:
        """Replicas that are blocked while ``leaver`` waits: this thread trains them, or lets them leave afterwards."""
        here = threading.current_thread()
        mine = [other for other, thread in self._living() if thread is here]
        others = {other.trains[1] for other in (*mine, *self._leaving) if other is not leaver}
        return sorted(others - {leaver.trains[1]})

    def leave(self) -> None:
        """Leaves for all at the end of the main thread. First waits for threads that still train, except daemons, as
        the interpreter does."""
        if self._process != os.getpid():
            return
        for _, thread in self._living():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        rest, self._open = self._living(), {}
        # The interpreter has printed its traceback. In a notebook the exception has ended only a cell.
        self.uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        failed = self.uncaught is not None
        able = [leaver for leaver, thread in rest if not (failed or thread.daemon or thread in self._failed)]
        for leaver in able:  # all of them first, so that none waits for another's round
            leaver.announce()
        deadline = time.monotonic() + (timeout_s := left_s())
        self._leaving = [leaver for leaver, _ in rest]
        for leaver, _ in rest:
            self._leaving.remove(leaver)
            flush = leaver in able
            if (text := leaver.unfinished()) and flush and signals.got is None:
                _log.warning(
                    "%s, and the script ends without close(): they are handed in now, %g s at most; use `with "
                    "optimizer:`, or call optimizer.close() at the end",
                    text,
                    timeout_s,
                )
            try:
                # A failed one leaves early; no exception is being handled here any more.
                leaver.close(flush=flush, timeout_s=max(0.0, deadline - time.monotonic()), early=not flush)
            except Exception:
                _log.exception("leaving the job at the end of the script failed")
        for dropped in list(self._dropped.values()):
            dropped.ended.wait(max(0.0, deadline - time.monotonic()) + _PART_S)


class _Dropped(threading.Thread):
    """Leaves for an optimizer that was collected without doing so.

    Attributes:
        parted: set when it no longer touches the model.
        ended: set when it has left. (A join fails if another thread finds this one before it is started.)
    """

    def __init__(self, leaver: Leaver, *, failed: bool) -> None:
        super().__init__(name="ftopt-leaving", daemon=True)
        self.leaver, self._failed = leaver, failed
        self.parted, self.ended = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            flush = self._part(self.leaver)
            self.leaver.close(flush=flush, timeout_s=left_s(), early=self._failed)
        except Exception:
            _log.exception("leaving the job of an optimizer that was dropped without close() failed")
        finally:
            self.parted.set()
            at_exit.remove(self.leaver)
            self.ended.set()

    def _part(self, leaver: Leaver) -> bool:
        """Parts from the model; returns whether the pending steps are handed in."""
        why = "its thread has failed" if self._failed else leaver.part_from_model()
        self.parted.set()
        what = leaver.unfinished() or f"replica {leaver.trains[1]} has nothing pending"
        if not leaver.unfinished():
            then = "it leaves its job"
        elif why:
            then = f"it leaves its job without handing them in: {why}"
        else:
            then = f"they are handed in now, {left_s():g} s at most"
        text = "%s, and its optimizer was dropped without close(): %s; use `with optimizer:`, or call optimizer.close()"
        _log.warning(text, what, then)
        return not why


at_exit = AtExit()
"""This process's instance."""


class Raised:
    """The error that ends a loop: one raised after this object was made, or one that a script has not caught.

    An error being handled at the start of training, as by a retry in an ``except`` block, does not end the loop.
    """

    def __init__(self) -> None:
        self._around = id(sys.exc_info()[1])

    def error(self) -> BaseException | None:
        """The error, while it is being handled, and at the end of the script."""
        error = sys.exc_info()[1]
        return error if error is not None and id(error) != self._around else at_exit.uncaught

    def why_at_once(self, *, early: bool) -> str:
        """Why a replica leaves without handing in its pending steps, for `warn_left`. Empty: its part of the job is
        done."""
        error = self.error()
        if isinstance(error, JobFailed):
            return "its job has failed"
        if isinstance(error, KeyboardInterrupt):
            return "Ctrl-C ended its loop; ftopt.wrap(..., leave_on_signals=True) hands them in"
        if not early and error is None:
            return ""
        return "it left at once, after an exception or by flush=False"

    def interrupted(self, *, flush: bool) -> bool:
        """Whether Ctrl-C, an exit, or an exception that is not ftopt's ends the loop, so that the same command can
        resume it."""
        error = self.error()
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return True
        return error is not None and not (flush or isinstance(error, FtoptError))

    def text(self) -> str:
        """The error, for the job's log; "": none, or the loop is not ended by an error."""
        error = self.error()
        if isinstance(error, SystemExit):
            failed = isinstance(error.code, str) or (isinstance(error.code, int) and 0 < error.code < _BY_SIGNAL)
            return f"exit status {error.code}"[:_CHARS] if failed else ""
        if not isinstance(error, Exception) or isinstance(error, JobFailed):
            return ""
        try:
            return f"{type(error).__name__}: {error}"[:_CHARS]
        except Exception:  # the text of an error is user code
            return type(error).__name__
