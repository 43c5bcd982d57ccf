"""Logs what keeps a replica's steps out of a round: it waits long, has no weight, is slow, or there is no round at all;
also that samples have run out.

What repeats round after round is logged the first time, the second, the fourth, and so on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from ftopt.common.plural import count, times
from ftopt.sync.protocol import messages as m
from ftopt.sync.replica.log.peers import listed

_log = logging.getLogger(__name__)
LONG_S = 5.0
"""Seconds of waiting after which a round is logged."""
SLOW_S = 15.0
"""Seconds of being slow after which a replica logs it: a busy machine has hiccups of seconds."""


class RoundsLog:
    """Logs about one replica's rounds. Any thread.

    Args:
        replica: its id.
    """

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._times = Counter[str]()
        self._without_samples = self._data_ended = False
        self._slow: m.Speed | None = None
        self._slow_since = 0.0
        self._slow_told = False

    def waits(self, version: int, seconds: float, before: Iterable[str]) -> None:
        """The round of ``version`` is undecided after ``seconds``; ``before``: members of the last version."""
        if self._is_due("waits"):
            peers = sorted({*before} - {self._replica})
            others = f"; {listed(peers)} took part in the version before" if peers else ""
            text = "replica %s has waited %.0f s for version %d%s; `ftopt status` shows what each of them is doing"
            _log.warning(text, self._replica, seconds, version, others)

    def goes_on(self, version: int, why: str, pending: int) -> None:
        """No round for ``version`` can be decided now."""
        if self._is_due(f"goes on: {why}"):
            text = "replica %s: no version %d yet: %s; it trains on, %s pending"
            _log.warning(text, self._replica, version, why, count(pending, "inner step"))

    def waits_for_samples(self, seconds: float, *, alone: bool) -> None:
        """The loop has no samples. ``alone``: the cause is that no coordinator answers. Logged once per wait."""
        if seconds < LONG_S:
            self._without_samples = False
        elif not self._without_samples:
            self._without_samples = True
            why = "the job hands them out, and no coordinator answers" if alone else "other replicas hold the rest"
            _log.warning("replica %s waits for samples: %s", self._replica, why)

    def data_ended(self, epochs: int | None, inner_step: int) -> None:
        """Every sample of all epochs is in the job's model, which is at ``inner_step``. Logged once."""
        if not self._data_ended:
            self._data_ended = True
            after = f" after {count(epochs, 'epoch')}" if epochs else ""
            _log.warning("replica %s: the data have ended%s, at inner step %d", self._replica, after, inner_step)

    def weighs_nothing(self, version: int, why: str) -> None:
        """``version`` is decided without this replica's contribution."""
        if self._is_due("weighs nothing"):
            text = "replica %s contributes nothing to version %d: %s; its steps stay pending"
            _log.warning(text, self._replica, version, why)

    def speed(self, speed: m.Speed, now_s: float) -> None:
        """This replica is slow, or up to speed again; the latter is logged only if the former was."""
        told, self._slow_told = self._slow_told, False
        self._slow, self._slow_since = (speed, now_s - speed.for_s) if speed.slow else (None, now_s)
        if speed.slow:
            self.look(now_s)
        elif told:
            text = "replica %s is up to speed again: a step takes %.3g s, %.3g s are usual in the job now"
            _log.warning(text, self._replica, speed.step_s, speed.usual_s)

    def look(self, now_s: float) -> None:
        """Logs once that the replica is slow, when it has been for long enough; called now and then."""
        if self._slow is not None and not self._slow_told and now_s - self._slow_since >= SLOW_S:
            self._slow_told = True
            self._tell_slow(self._slow, now_s - self._slow_since)

    def _tell_slow(self, speed: m.Speed, for_s: float) -> None:
        compared = f"a step takes {speed.step_s:.3g} s, {speed.usual_s:.3g} s are usual in the job"
        before = f" (before: {times(speed.before)})" if speed.before else ""
        follows = "rounds wait for it"
        if speed.called_in:
            follows = "rounds call it in early; steps that come too late count in a later round, if the job makes one"
        text = "replica %s has been slow for %.0f s: %s, %s as much%s; %s"
        _log.warning(text, self._replica, for_s, compared, times(speed.factor), before, follows)

    def stopped(self, news: m.JobStopped) -> None:
        """The job is stopped. Logged once."""
        if not self._times["stopped"]:
            self._times["stopped"] += 1
            text = (
                "replica %s: %s has stopped the job: %s; the loop of each replica ends when it sees optimizer.stopped"
            )
            _log.warning(text, self._replica, news.replica, news.reason)

    def _is_due(self, kind: str) -> bool:
        self._times[kind] += 1
        return not self._times[kind] & (self._times[kind] - 1)
