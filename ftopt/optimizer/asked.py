"""Requests to a process to leave its jobs in good order: a signal, or the end of the torchrun that has started it.

A signal handler only notes the signal. The loop ends at the end of a step, when the parameters are whole, by
`Leave`, and `with optimizer:` then hands in the pending steps.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ftopt.common.launched import tell_end
from ftopt.errors import UserError

_log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""Maximum seconds for leaving in good order, unless the user sets another limit."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KILLED_S = 25.0
"""Maximum seconds after SIGTERM: torchrun, Kubernetes and Slurm kill the process after 30 s."""
_LEAST_S = 5.0
_SENT_S = 1.0
"""Seconds within which a signal sent to several processes in turn reaches all of them."""

_Before = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
"""What `signal.getsignal` returns."""


def by_environment() -> bool:
    """Whether the process that has started this one wants it to leave on signals, as ``ftopt launch`` does
    (``FTOPT_LEAVE_ON_SIGNALS=1``). Not on a thread, which cannot handle them."""
    wanted = os.environ.get("FTOPT_LEAVE_ON_SIGNALS") == "1"
    return wanted and threading.current_thread() is threading.main_thread()


class Leave(SystemExit):
    """Ends the user's loop, or its join, with exit status 0, so that no launcher restarts the process."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        tell_end(early=True)


class Signals:
    """SIGTERM and Ctrl-C, while some optimizer of this process listens to them.

    The first signal is noted. A second SIGTERM counts as the same one: schedulers send it to all processes, and
    launchers pass it on to them. All others act as without this object: a second Ctrl-C ends the process at once, and
    so does SIGTERM after Ctrl-C, as which torchrun passes on a second Ctrl-C.

    Attributes:
        got: the first signal; None: none yet.
        at_s: its time by the monotonic clock.
    """

    def __init__(self) -> None:
        self.got: signal.Signals | None = None
        self.at_s = 0.0
        self._listeners: set[int] = set()
        self._joining: set[int] = set()
        self._handlers: dict[int, _Handler] = {}
        self._process = 0
        # Before the child runs a line: SIG_DFL ends it anywhere, a handler only where Python checks for signals.
        os.register_at_fork(after_in_child=self._restore)

    def listen(self, who: object, *, joining: bool = False) -> None:
        """Notes signals from now on, for ``who``. While ``joining``, a signal ends the process at once: there is
        nothing to leave yet. Signals that the process ignores stay ignored.

        Raises:
            UserError: this is not the main thread, the only one in which Python handles signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UserError(
                "leave_on_signals=True on a thread that is not the main one, where alone Python handles signals; leave "
                "it out there, and let the main thread tell this one when to end its loop"
            )
        if self._process != os.getpid():
            self._process, self._listeners, self._joining, self.got = os.getpid(), set(), set(), None
        if not self._listeners:
            found = {number: signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {n: _Handler(self, x) for n, x in found.items() if x is not signal.SIG_IGN}
            for number in self._handlers:
                signal.signal(number, self._handlers[number])
        self._listeners.add(id(who))
        (self._joining.add if joining else self._joining.discard)(id(who))

    def end(self, who: object) -> None:
        """Notes that ``who`` has left; after the last listener, signals are handled as before."""
        if self._process != os.getpid() or id(who) not in self._listeners:
            return
        self._listeners.discard(id(who))
        self._joining.discard(id(who))
        if not self._listeners:
            self._restore()
            self.got = None

    def takes(self, number: int, handler: _Handler) -> bool:
        """Whether this signal is noted, now or already; if not, restores the former handlers."""
        if self._handlers.get(number) is not handler or not self._listeners:  # the handler is obsolete
            return False
        got = signal.Signals(number)
        if self._process != os.getpid() or (self.got is not None and {got, self.got} != {signal.SIGTERM}):
            self._restore()  # also in a forked child that a signal reaches before the fork's own `_restore`
            return False
        if self.got is None:
            self.got, self.at_s = got, time.monotonic()
            if self._joining:
                raise Leave(0)
        return True

    def _restore(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            before = signal.SIG_DFL if handler.before is None else handler.before
            if signal.getsignal(number) is handler:  # else user code has set another handler since
                signal.signal(number, before)


class _Handler:
    """The handler of one signal, from the first listener's start to the last one's end. User code that has wrapped it
    in its own handler may call it at any time, also later."""

    def __init__(self, signals: Signals, before: _Before) -> None:
        self._signals = signals
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._signals.takes(number, self):
            return
        if callable(self.before):  # not by the signal: a handler around this one would return here
            self.before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


signals = Signals()
"""This process's instance."""


class Asked:
    """Whether a replica, or a rank of one, is asked to leave.

    Args:
        on_signals: whether SIGTERM and Ctrl-C ask it. The end of a torchrun always does: nobody would restart its
            ranks, and nobody else could take their id.

    Attributes:
        watches: whether anything can ask it.
    """

    def __init__(self, *, on_signals: bool = False) -> None:
        self._on_signals = on_signals
        self._launcher = os.getppid() if os.environ.get("TORCHELASTIC_RUN_ID") else None
        self.watches = on_signals or self._launcher is not None

    def why(self) -> str:
        """The reason; "": it is not asked to leave."""
        if self._on_signals and (got := signals.got) is not None:
            return "Ctrl-C" if got is signal.SIGINT else got.name
        if self._launcher is not None and os.getppid() != self._launcher:
            return f"the process that has started it, pid {self._launcher}, torchrun, is gone"
        return ""

    def why_worker_died(self, error: BaseException | None) -> str:
        """`why`, if ``error`` reports a lost worker of a data loader; "" otherwise. The signal that asks this process
        to leave may have reached its whole process group and ended the worker, which torch's own loader does not
        prevent."""
        ends_s = time.monotonic() + _SENT_S
        while self._on_signals and _is_lost_worker(error):
            if (why := self.why()) or time.monotonic() >= ends_s:
                return why
            time.sleep(0.01)
        return ""

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Surrounds the join of a job."""
        if not self._on_signals:
            yield
            return
        signals.listen(self, joining=True)
        try:
            yield
            signals.listen(self)
        except BaseException:
            signals.end(self)
            raise

    def joined(self) -> None:
        """Listens from now on."""
        if self._on_signals:
            signals.listen(self)

    def left(self) -> None:
        """Stops listening: the job has been left."""
        signals.end(self)


def _is_lost_worker(error: BaseException | None) -> bool:
    """Whether torch's `DataLoader` has lost a worker: it reports this, or cannot read the worker's data."""
    text = str(error)
    if isinstance(error, RuntimeError):
        ended = "exited unexpectedly" in text or "killed by signal" in text
        return text.startswith("DataLoader worker") and ended
    if not isinstance(error, OSError | EOFError) or "in DataLoader worker process" in text:  # an error of the data set
        return False
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    trace = error.__traceback__
    while trace is not None and not isinstance(trace.tb_frame.f_locals.get("self"), _MultiProcessingDataLoaderIter):
        trace = trace.tb_next
    return trace is not None


def leave(replica: str, why: str, before: Callable[[], object] = lambda: None) -> NoReturn:
    """Calls ``before``, and ends the user's loop."""
    _log.warning("replica %s leaves its job: %s", replica, why)
    before()
    raise Leave(0)


def left_s() -> float:
    """Seconds that leaving may take."""
    if signals.got is None:
        return TIMEOUT_S
    return max(_LEAST_S, _KILLED_S - (time.monotonic() - signals.at_s))
