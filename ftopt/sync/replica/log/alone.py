"""Logs, once each, that no coordinator answers, so that a replica trains alone or waits to start, and that one answers
again; also that its process did not run for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ftopt.common.plural import count

_log = logging.getLogger(__name__)


class Alone:
    """Looks at each heartbeat and at each new connection. Outages shorter than ``patience_s`` are not logged.

    Args:
        replica: its id.
        pending: returns the number of inner steps that no committed state contains; None for a spare, which takes none.
        patience_s: seconds without a coordinator after which the log says so.
    """

    def __init__(self, replica: str, pending: Callable[[], int | None], patience_s: float) -> None:
        self._replica, self._pending, self._patience_s = replica, pending, patience_s
        self._answered_s: float | None = None
        self._looked_s: float | None = None
        self._started = False
        self._said = False
        self._held = 0

    def look(self, *, welcomed: bool, reached: bool, begun: bool, told: str = "") -> None:
        """Logs what has changed. Before a replica begins, a coordinator that it has reached counts as answering, even
        if the replica has to wait.

        Nothing is logged before the first answer: the first connection has its own messages.

        Args:
            welcomed: whether its job has let it in.
            reached: whether the coordinator is there, even if the replica has to wait.
            begun: whether it trains, or stands by.
            told: the answer of a coordinator that does not let it in; "": none answers.
        """
        now = time.monotonic()
        if self._looked_s is not None and now - self._looked_s > self._patience_s:
            text = "replica %s: this process was held up for %.0f s (stopped, or the machine is overloaded)"
            if self._steps() is not None:
                text += "; its peers may have gone on without it, and its steps go into the next round"
            _log.warning(text, self._replica, now - self._looked_s)
        self._looked_s = now
        answers = welcomed if self._started else welcomed or reached
        if answers:
            if self._said and self._answered_s is not None:
                rest = ""
                if (pending := self._steps()) is not None:  # the round may have been decided since the last look
                    held = count(max(pending, self._held), "pending inner step goes", "pending inner steps go")
                    rest = f"; {held} into the next round"
                text = "replica %s: the coordinator is back after %.0f s%s"
                _log.warning(text, self._replica, now - self._answered_s, rest)
            self._answered_s, self._said, self._held = now, False, 0
            self._started |= begun
        if answers or self._answered_s is None:
            return
        pending = self._steps()
        self._held = pending or 0
        if not self._said and now > self._answered_s + self._patience_s:
            self._said = True
            why = f"a coordinator answers, and does not let it in ({told})" if told else "no coordinator answers"
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._answered_s)))
            if not self._started:
                text = "replica %s: waits to start, and no coordinator answers since %s; still trying"
                _log.warning(text, self._replica, since)
                return
            if pending is None:
                _log.warning("replica %s: standing by alone since %s: %s; still trying", self._replica, since, why)
                return
            text = "replica %s: training alone since %s, %s pending: %s; still trying"
            _log.warning(text, self._replica, since, count(pending, "inner step"), why)

    def _steps(self) -> int | None:
        """The pending steps; None also before the start, when it has taken none."""
        return self._pending() if self._started else None
