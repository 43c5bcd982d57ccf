"""How a replica leaves: it hands in what is pending, and says what is lost; also where a script ends without `close`.

A script may end without ``close()`` or ``with optimizer:``. Then `at_exit` leaves in its place: before the interpreter
forbids new work on threads, which the outer step needs, hence not in `atexit`, whose turn comes later. After an
exception that nobody has caught, in the main thread or in the one that trains, it leaves without waiting, as ``with``
does. After ``sys.exit(1)`` outside of ``with`` it cannot: Python has forgotten the exit status by then. A forked child
neither trains nor leaves: the membership is its parent's, whose threads do not run there.

An optimizer that is collected without ``close()`` leaves, too: a notebook's cell that is run again drops the last one.
Its steps are handed in on a thread of its own. Its model may live on, and is not touched any more.
"""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import os
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ftopt.common.plural import count
from ftopt.errors import FtoptError, JobFailed, UserError
from ftopt.optimizer.asked import left_s, signals
from ftopt.step.outer.step import OuterStep
from ftopt.sync.group import Committed, End, ReplicaGroup

_log = logging.getLogger(__name__)

_CHARS = 300
"""Of an error, for the others' logs."""
_BY_SIGNAL = 128
"""Exit statuses from here on name a signal."""

_POLL_S = 0.005
_EARLY = 0.75
_PART_S = 10.0
_CONNECTED_BY = ("COORDINATOR", "JOB", "HOST", "INTERFACE", "CA", "CERT", "KEY")
"""What `ftopt.connect` takes from the environment; without the replica's id, and the token, which no log may show."""


def hand_in(
    outer: OuterStep,
    group: ReplicaGroup,
    largest_lr: Callable[[], float],
    deadline: float,
    clock: Callable[[], float],
    *,
    early: bool,
) -> None:
    """Offers what is pending and waits for it, until nothing is, or until ``deadline`` by ``clock``.

    A leaver's proposal opens no round: where all end together, each would open one. ``early``: this replica ends before
    the others, whose next round may be hours away, and opens one before it says that it leaves, for three quarters of
    the time. Where replicas exchange gradients rounds are short, and it would be waited for.
    """
    if early and outer.gradients is None and group.global_batch is None:
        outer.report("waiting")
        _offer(outer, group, largest_lr, clock() + _EARLY * (deadline - clock()), clock)
    outer.report("leaving")  # before anything is proposed: so it opens no round, and is not waited for
    _offer(outer, group, largest_lr, deadline, clock)


def end_together(
    outer: OuterStep, group: ReplicaGroup, *, but: Sequence[str], timeout_s: float, until: Callable[[], bool]
) -> Callable[[], None]:
    """The loop has ended, and what was pending is handed in: waits until the others that come to their end are there
    (END), and takes over the newest version, with which all go. Time is left to save it. Returns what tells of it."""
    began = time.monotonic()
    end = group.wait_for_end(outer.inner_step(), but=but, timeout_s=_EARLY * timeout_s, until=until)
    outer.apply()
    if group.closed or until():
        return lambda: None
    return partial(_tell_end, outer, group.replica, end, time.monotonic() - began)


def _tell_end(outer: OuterStep, replica: str, end: End | None, waited_s: float) -> None:
    """With which version a replica ends, and whether the others do."""
    meta = outer.fragments[0].state.meta
    at = f"replica {replica} ends with version {meta.version}, inner step {meta.inner_step}"
    if end is None or end.awaited or not end.whole:
        whom = "a word of the coordinator" if end is None else ", ".join(end.awaited) or "the newest version"
        text = "%s: it has waited %.1f s for %s, in vain: the final weights of others may be those of another version"
        _log.warning(text, at, waited_s, whom)
    elif end.differ:
        text = "%s: %s ended with another one: the final weights differ; use those of the later version"
        _log.warning(text, at, ", ".join(end.differ))
    elif len(end.alike) > 1:
        _log.warning("%s: final weights of %d replicas: identical", at, len(end.alike))


def patience_s(group: ReplicaGroup) -> float:
    """How long what a leaver has handed in may take to be decided. A share of a global batch only as long as another
    replica that has the rest may be waited for: when all leave at once, nobody computes it."""
    return math.inf if group.global_batch is None else group.sync.grace_s + group.sync.dead_after_s


def _offer(
    outer: OuterStep, group: ReplicaGroup, largest_lr: Callable[[], float], deadline: float, clock: Callable[[], float]
) -> None:
    """A round that was under way may end without this replica's last steps, which are then offered to the next one.
    What a round was offered and did not take is not offered to it again. A version that is being fetched comes first:
    nothing can be offered to an older one. A closed group takes nothing."""
    offered: dict[int, int] = {}
    while not group.closed:
        group.check()
        outer.apply()
        waits = fetches = not group.catch_up(timeout_s=0.0)
        for index, fragment in enumerate(outer.fragments):
            # The newer state is there before the group says that nothing is outstanding.
            if group.outstanding(index) or fragment.state is not fragment.applied:
                waits = True
            elif not fetches and offered.get(index) != (version := fragment.state.meta.version):
                offered[index] = version
                waits |= outer.propose_pending(index, lr=largest_lr())
        # Not group.wait(): that has no deadline, and a user who leaves has one.
        if not waits or clock() >= deadline:
            return
        time.sleep(_POLL_S)


def tell_left(outer: OuterStep, replica: str, reason: str) -> None:
    """Steps that are in no outer step, whether this replica had time to hand them in or not; ``reason``: see
    `Raised.why_at_once`."""
    left = [fragment.pending_steps for fragment in outer.fragments if not fragment.by_job]
    if any(left):
        where = f" (by fragment: {', '.join(map(str, left))})" if len(left) > 1 else ""
        undecided = any(outer.shared.group.outstanding(fragment.index) for fragment in outer.fragments)
        unless = ", unless the round that it was in still counts them" if undecided else ""
        text = "replica %s has left with %s that no committed state contains%s%s: %s"
        why = reason or "it is done, and they came too late for its last outer step"
        _log.warning(text, replica, count(max(left), "inner step"), where, unless, why)


def not_stepped(outer: OuterStep) -> bool:
    """Whether the loop has trained, but with the inner optimizer itself, of whose steps the job knows nothing. All
    ranks call it alike."""
    if outer.counters.local_steps or outer.gradients is not None:
        return False
    fragments = [f for f in outer.fragments if not f.by_job]
    return not all(all(f.view.together(torch.equal(f.view.read(f.view.empty()), f.start))) for f in fragments)


def tell_not_stepped(replica: str) -> None:
    """See `not_stepped`."""
    text = (
        "replica %s has changed its parameters without one step() of the wrapped optimizer: the job has nothing of "
        "it; call step() of what ftopt.wrap() returns, in place of the inner optimizer's"
    )
    _log.warning(text, replica)


class Raised:
    """The error that ends a loop: one that is raised after this was made, or that a script has not caught.

    An error that is being handled at the start of training, as by a retry in an ``except`` block, ends nothing.
    """

    def __init__(self) -> None:
        self._around = id(sys.exc_info()[1])

    def error(self) -> BaseException | None:
        """It, while it is being handled, and at the end of the script."""
        error = sys.exc_info()[1]
        return error if error is not None and id(error) != self._around else at_exit.uncaught

    def why_at_once(self, *, early: bool) -> str:
        """Why a replica leaves without handing in what is pending: for `tell_left`. Empty: its part of the job is
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
        """Whether Ctrl-C, an exit, or an exception that is not ftopt's ends the loop: the same command goes on."""
        error = self.error()
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return True
        return error is not None and not (flush or isinstance(error, FtoptError))

    def text(self) -> str:
        """The error, for the job's log; "": there is none, or what ends the loop is no error."""
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


def tell_joined(replica: str, life: int, committed: Committed) -> None:
    """That a replica trains, and from where; a later incarnation as a warning, since its predecessor has ended."""
    if life > 1:
        text = "replica %s is back as incarnation %d: it trains from the job's version %d, inner step %d on"
        _log.warning(text, replica, life, committed.version, committed.inner_step)
    else:
        text = "replica %s trains from version %d, inner step %d on"
        _log.info(text, replica, committed.version, committed.inner_step)


def tell_way_on(outer: OuterStep, replica: str) -> None:
    """Where a replica stands that a signal has ended, and how to start it again, if it was started by a command of its
    own: not by torchrun, or as a process of `multiprocessing`."""
    meta, steps = outer.fragments[0].state.meta, outer.counters.local_steps
    pending = max(outer.pending_by_fragment(), default=0)
    others = "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process() is not None
    again = "" if others else f"; to go on: {_command(replica)}"
    taken = count(steps, "inner step")
    verb = "is" if pending == 1 else "are"
    where = f"of its {taken} {pending} {verb} in no version" if pending else f"none of its {taken} is pending"
    _log.warning(
        "replica %s has left at version %d, inner step %d: %s%s", replica, meta.version, meta.inner_step, where, again
    )


def _command(replica: str) -> str:
    """What has started this process, to be pasted into a shell that has its token, if any."""
    names = [f"FTOPT_{name}" for name in _CONNECTED_BY]
    if os.environ.get("FTOPT_REPLICA") == replica:
        names.append("FTOPT_REPLICA")
    named = [f"{name}={shlex.quote(value)}" for name in names if (value := os.environ.get(name))]
    return " ".join([*named, shlex.join(sys.orig_argv)])


FORKED = (
    "this process was forked from the one that has joined the job: the membership stays there; train there, or connect "
    "and wrap in this process"
)


class Leaver(Protocol):
    """An optimizer that has joined a job and not left it."""

    @property
    def trains(self) -> tuple[nn.Module | None, str]:
        """Its model, and the replica that it is."""

    def announce(self) -> None:
        """Tells the job that this replica leaves."""

    def disown(self) -> None:
        """This process is a forked child: `close` does nothing here, and a step is an error."""

    def close(self, *, flush: bool, timeout_s: float, early: bool) -> None: ...

    def unfinished(self) -> str:
        """Whose steps are pending, and how many; "": none."""


class LeavesAlone(Leaver, Protocol):
    """One that can leave when user code has dropped it, and does with the model what it likes."""

    def note_dropped(self) -> None:
        """User code drops it now; within the collector."""

    def part_from_model(self) -> str:
        """From here on the model is neither read nor changed. Returns why the pending steps cannot be handed in; "":
        they can be."""


class AtExit:
    """Leaves in the place of scripts that end without it.

    Attributes:
        uncaught: what has ended the main thread, while this object leaves.
    """

    def __init__(self) -> None:
        self.uncaught: BaseException | None = None
        self._open: dict[int, tuple[Callable[[], Leaver | None], threading.Thread]] = {}
        self._dropped: dict[int, _Dropped] = {}
        self._failed: set[threading.Thread] = set()
        self._leaving: list[Leaver] = []
        """At the end of the script: those that leave one after the other, and have not begun."""
        self._process = 0
        os.register_at_fork(after_in_child=self._disown)

    def _disown(self) -> None:
        for leaver, _ in self._living():
            leaver.disown()

    def _living(self) -> list[tuple[Leaver, threading.Thread]]:
        found = [(find(), thread) for find, thread in list(self._open.values())]
        return [(leaver, thread) for leaver, thread in found if leaver is not None]

    def add(self, leaver: Leaver, *, keep: bool = True) -> None:
        """``leaver`` has joined, and is trained by this thread. ``keep`` it until `remove`; else it says itself when it
        is `dropped`."""
        if self._process != os.getpid():
            self._process, self._open, self._dropped, self._failed = os.getpid(), {}, {}, set()
            threading._register_atexit(self.leave)  # type: ignore[attr-defined]
            self._note_failed_threads()
        find: Callable[[], Leaver | None] = (lambda: leaver) if keep else weakref.ref(leaver)
        self._open[id(leaver)] = (find, threading.current_thread())

    def _note_failed_threads(self) -> None:
        """A thread that ends by an exception, or by an exit status other than 0, has failed."""
        tell = threading.excepthook

        def note(raised: threading.ExceptHookArgs) -> None:
            exits = isinstance(raised.exc_value, SystemExit) and raised.exc_value.code in (None, 0)
            if raised.thread is not None and not exits:
                self._failed.update(thread for _, thread in self._living() if thread is raised.thread)
            tell(raised)

        threading.excepthook = note

    def remove(self, leaver: Leaver) -> None:
        """``leaver`` has left, or could not join."""
        self._open.pop(id(leaver), None)
        self._dropped.pop(id(leaver), None)

    def dropped(self, leaver: LeavesAlone) -> None:
        """``leaver`` is being collected: it leaves, on a thread of its own. On any thread, within whatever it does."""
        if self._process != os.getpid() or (found := self._open.pop(id(leaver), None)) is None:
            return
        leaver.note_dropped()
        self._dropped[id(leaver)] = dropped = _Dropped(leaver, failed=found[1] in self._failed)
        try:
            dropped.start()
        except RuntimeError:  # the interpreter ends
            self._dropped.pop(id(leaver), None)
            dropped.parted.set()
            dropped.ended.set()

    def check_alone(self, model: nn.Module) -> None:
        """UserError: another optimizer of this process takes part in a job with parameters of this model. It waits for
        one that is dropped until it has parted from the model."""
        if self._process != os.getpid():
            return
        if self._who_trains(model) is not None:
            gc.collect()  # it may have been dropped
        if (replica := self._who_trains(model)) is not None:
            raise UserError(
                f"this model is trained as replica {replica!r} already, by an optimizer that has not left its job: "
                "each step would count twice; call close() of that optimizer first (in a notebook: run "
                "optimizer.close(), then this cell again), or give each replica a model of its own"
            )
        for dropped in list(self._dropped.values()):
            dropped.parted.wait(_PART_S)

    def _who_trains(self, model: nn.Module) -> str | None:
        own = {id(parameter) for parameter in model.parameters()}
        for leaver, _ in self._living():
            other, replica = leaver.trains
            if other is not None and any(id(parameter) in own for parameter in other.parameters()):
                return replica
        return None

    def await_dropped(self, replica: str) -> None:
        """Waits until an optimizer that was dropped has left as this replica: the next one would supersede it."""
        for dropped in list(self._dropped.values()):
            if self._process == os.getpid() and dropped.leaver.trains[1] == replica:
                dropped.ended.wait(left_s() + _PART_S)

    def beside(self, leaver: Leaver) -> list[str]:
        """Replicas that cannot move while ``leaver`` waits: this thread trains them, or lets them leave after it."""
        here = threading.current_thread()
        mine = [other for other, thread in self._living() if thread is here]
        others = {other.trains[1] for other in (*mine, *self._leaving) if other is not leaver}
        return sorted(others - {leaver.trains[1]})

    def leave(self) -> None:
        """The main thread has ended. Threads that still train are waited for, but for daemons, which are not: the
        interpreter does the same."""
        if self._process != os.getpid():
            return
        for _, thread in self._living():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        rest, self._open = self._living(), {}
        # The interpreter has printed its traceback. In a notebook it has ended a cell, and not the session.
        self.uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        failed = self.uncaught is not None
        able = [leaver for leaver, thread in rest if not (failed or thread.daemon or thread in self._failed)]
        for leaver in able:  # first all, so that none waits for a round of another
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
                # One that has failed leaves early: in here no exception is being handled any more.
                leaver.close(flush=flush, timeout_s=max(0.0, deadline - time.monotonic()), early=not flush)
            except Exception:
                _log.exception("leaving the job at the end of the script failed")
        for dropped in list(self._dropped.values()):
            dropped.ended.wait(max(0.0, deadline - time.monotonic()) + _PART_S)


class _Dropped(threading.Thread):
    """Leaves in the place of an optimizer that was collected without it.

    Attributes:
        parted: it does not touch the model any more.
        ended: it has left. (A join fails where another thread has found this one before it was started.)
    """

    def __init__(self, leaver: LeavesAlone, *, failed: bool) -> None:
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

    def _part(self, leaver: LeavesAlone) -> bool:
        """Whether the pending steps are handed in."""
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
"""This process'."""
