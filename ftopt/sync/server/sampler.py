"""Samples a job's replicas every few seconds: rows of the history, and events with losses and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict

from ftopt.events import Event
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.watch.rings import History

_LOSS_S, _COUNTS_S = 1.0, 5.0
"""Mean seconds between two `losses` events, and two `counts` events, per replica in them, so that the record of a job
that runs for weeks stays small."""


class Sampler:
    """Samples one job.

    Args:
        history: gets a row with each sample.
        emit: passes an event on.
    """

    def __init__(self, history: History, emit: Callable[[Event], None]) -> None:
        self._history, self._emit = history, emit
        self._losses, self._counts = _Due(_LOSS_S), _Due(_COUNTS_S)

    def sample(self, members: Collection[Member], now: float) -> None:
        """Records what is known of ``members`` at ``now``, in seconds; the only record of the losses of scripts."""
        counted = {x.replica: None if x.counts is None else asdict(x.counts) for x in members}
        shown = [
            {
                "replica": x.replica,
                "incarnation": x.incarnation,
                "state": x.state if x.conn is not None else "away",
                "stalled": x.stalled,
                "inner_step": x.inner_step,
                "loss": x.loss,
                "counts": counted[x.replica],
            }
            for x in members
        ]
        self._history.sample(shown, now)
        here = [x for x in members if x.conn is not None]
        losses = {x.replica: [x.incarnation, x.inner_step, x.loss] for x in here if isinstance(x.loss, float)}
        if self._losses.is_due(losses, now):
            self._emit(Event("losses", "coordinator", data={"losses": losses}))
        self.count(members, now)

    def count(self, members: Collection[Member], now: float) -> None:
        """Emits what the connected ``members`` have counted, if it is due at ``now``; infinity: if it has changed."""
        known = {x.replica: (x.incarnation, x.counts) for x in members if x.conn is not None}
        counts = {replica: [life, asdict(told)] for replica, (life, told) in known.items() if told is not None}
        if self._counts.is_due(counts, now):
            self._emit(Event("counts", "coordinator", data={"counts": counts}))


class _Due:
    """Decides when an event about all replicas is emitted again. ``each_s``: seconds per replica in it."""

    def __init__(self, each_s: float) -> None:
        self._each_s = each_s
        self._last: Mapping[str, object] = {}
        self._at_s = -math.inf

    def is_due(self, news: Mapping[str, object], now: float) -> bool:
        """Whether ``news`` (replica -> value) is emitted now: it has changed, and enough time has passed."""
        if not news or news == self._last or now < self._at_s:
            return False
        self._last, self._at_s = news, now + len(news) * self._each_s
        return True
