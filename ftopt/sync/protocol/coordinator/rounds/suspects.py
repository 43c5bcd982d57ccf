"""Suspects: members that may be the cause of failures that name no peer, and which of them sit out.

Such a failure may have its cause in any member of its attempt: an interface that is down, a device that computes wrong,
a host that answers too late. Often the sound members complain first. If one member is broken, it was in every failed
attempt, and in none that has committed: those are the suspects. From the second failure of a round on, half of them sit
out: first those that have sat out less often, then the one that has reported; a member that has reported twice sits out
alone. All others take part, and either commit, or narrow the suspects down. So a round needs two failures, and one for
each halving, whatever the broken member reports. If several members are broken, those that report failures sit out, one
after another.

A suspect is tried again ``dead_after_s`` after the others have made a version, or nothing can be made of what they
have. Each further failure doubles this pause, up to `PAUSES` times ``dead_after_s``. An attempt that commits with it
and others ends the suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ftopt.sync.protocol.coordinator.roster.roster import PAUSES
from ftopt.sync.protocol.messages import IncarnationId, is_gone


@dataclass
class _Record:
    """A member's record. ``reports``: failures that it has reported; ``times``: how often it has sat out, the last time
    for ``pause_s`` after the next version, from ``since_s`` until ``until_s``."""

    reports: int = 0
    times: int = 0
    pause_s: float = 0.0
    since_s: float = -math.inf
    until_s: float = -math.inf


class Suspects:
    """The suspects of one job, the same for all fragments."""

    def __init__(self) -> None:
        self._records: dict[IncarnationId, _Record] = {}
        self._suspects: frozenset[IncarnationId] = frozenset()
        """Members of each failed attempt that were in none that has committed since."""
        self._changed_s = -math.inf
        self._doubted: set[IncarnationId] = set()

    def doubts(self, incarnation_id: IncarnationId) -> bool:
        """Notes that a member finds a result implausible; returns whether that is the first time since it met others: a
        jump may be large and right, and all members doubt it once."""
        first = incarnation_id not in self._doubted
        self._doubted.add(incarnation_id)
        return first

    def failed(
        self,
        now: float,
        members: Sequence[IncarnationId],
        reporter: IncarnationId,
        *,
        began_s: float,
        again: bool,
        dead_after_s: float,
    ) -> dict[IncarnationId, float]:
        """Notes that an attempt of ``members``, begun at ``began_s``, has failed, and ``reporter`` names no peer.
        ``again``: it is not the first such failure of its round. Returns the members that now sit out, and for how many
        seconds after the next version."""
        if began_s < self._changed_s:
            return {}  # another fragment's attempt, begun before the last change of suspects
        self._record(reporter).reports += 1
        known = self._suspects & set(members)
        self._suspects = known or frozenset(members)
        if not (known or again):
            return {}
        out = self._halve(reporter)
        self._changed_s = now
        for x, record in self._records.items():
            if x not in self._suspects and record.reports < 2:  # there was a failure without it, too
                record.until_s = -math.inf
        found = {}
        for x in out:
            record = self._record(x)
            record.times += 1
            record.pause_s = min(max(2 * record.pause_s, dead_after_s), PAUSES * dead_after_s)
            record.since_s, record.until_s = now, math.inf
            found[x] = record.pause_s
        return found

    def _halve(self, reporter: IncarnationId) -> list[IncarnationId]:
        """The suspects that sit out next."""
        known = {x: self._record(x) for x in sorted(self._suspects)}
        suspects = sorted(known, key=lambda x: (known[x].times, x != reporter, -known[x].reports))
        if suspects[0] == reporter and known[reporter].reports >= 2:
            return [reporter]
        return suspects[: max(1, len(suspects) // 2)]

    def _record(self, incarnation_id: IncarnationId) -> _Record:
        return self._records.setdefault(incarnation_id, _Record())

    def met(self, now: float, members: Collection[IncarnationId]) -> None:
        """Clears the members of a committed attempt. One alone proves nothing."""
        if len(members) > 1:
            self._doubted.difference_update(members)
            self._suspects = self._suspects.difference(members)
            self._records = {x: record for x, record in self._records.items() if x not in members}
        self.released(now)

    def released(self, now: float) -> None:
        """Starts the pauses, since the search of a round has ended."""
        for record in self._records.values():
            if record.until_s == math.inf:
                record.until_s = now + record.pause_s

    def forget(self, gone: IncarnationId) -> None:
        old = dict([gone])
        self._doubted.discard(gone)
        self._suspects = frozenset(x for x in self._suspects if not is_gone(x, old))
        self._records = {x: record for x, record in self._records.items() if not is_gone(x, old)}

    def rest_s(self, now: float, incarnation_id: IncarnationId) -> float:
        """For how many seconds more a member sits out; inf: until others have made a version; 0: it does not."""
        record = self._records.get(incarnation_id)
        return 0.0 if record is None else max(0.0, record.until_s - now)

    def since_s(self, incarnation_id: IncarnationId) -> float:
        """When a member last began to sit out."""
        record = self._records.get(incarnation_id)
        return -math.inf if record is None else record.since_s

    def __bool__(self) -> bool:
        return bool(self._records)
