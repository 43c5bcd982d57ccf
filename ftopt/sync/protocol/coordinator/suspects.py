"""Members whose reductions fail while nobody knows why, and which of them sit out.

A failure that names no peer may have its cause in any member of its attempt: an interface that is down, a device that
computes wrong, no memory. Who reports two of them is kept out. Where different members report them, half of the members
are, the ones that reported first: the other half commits, or is halved in turn. So a round needs two failures, and then
one for each halving, whatever the broken member says or does not say.

Who is kept out is a suspect, until an attempt commits with it and others. It is tried again ``dead_after_s`` after the
others have made a version, or nothing can be made of what they have; after each further failure when twice as long has
passed, `PAUSES` times ``dead_after_s`` at most. If an attempt with suspects fails, only these are halved, and the last
one that is left is the broken one: the others come back at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ftopt.sync.protocol.messages import IncarnationId, is_gone

PAUSES = 20
"""The longest pause before a member or a pair is tried again, in units of ``dead_after_s``."""
_ENOUGH = 2
"""Failures that make a suspect."""


@dataclass
class _Record:
    """``failures``: that it has reported, or at least `_ENOUGH` of a suspect. It sits out from ``since_s`` until
    ``until_s``, which is ``pause_s`` after the next version."""

    failures: int = 0
    pause_s: float = 0.0
    since_s: float = -math.inf
    until_s: float = -math.inf


class Suspects:
    """Of one job: the same for all fragments."""

    def __init__(self) -> None:
        self._records: dict[IncarnationId, _Record] = {}
        self._doubted: set[IncarnationId] = set()

    def doubts(self, incarnation_id: IncarnationId) -> bool:
        """It finds the values of a result implausible. Whether it is for the first time since it met others: a jump may
        be large and right, and all members doubt it once."""
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
        """An attempt of ``members`` that began at ``began_s`` has failed, and ``reporter`` names no peer. ``again``: it
        is not the first such failure of its round. Returns who sits out from now on, and for how many seconds
        after the next version."""
        own = self._records.setdefault(reporter, _Record())
        if began_s < own.since_s:
            return {}  # another fragment's attempt, begun before it was kept out
        own.failures += 1
        suspects = [x for x in members if self._failures(x) >= _ENOUGH]
        if not suspects and not again:
            return {}
        if len(suspects) == 1 < len(members):
            self._records = {x: record for x, record in self._records.items() if x == suspects[0]}
        suspects = sorted(suspects or members, key=lambda x: (x != reporter, -self._failures(x)))
        found = {}
        for x in suspects[: max(1, len(suspects) // 2)]:
            record = self._records.setdefault(x, _Record())
            record.failures = max(record.failures, _ENOUGH)
            record.pause_s = min(max(2 * record.pause_s, dead_after_s), PAUSES * dead_after_s)
            record.since_s, record.until_s = now, math.inf
            found[x] = record.pause_s
        return found

    def _failures(self, incarnation_id: IncarnationId) -> int:
        record = self._records.get(incarnation_id)
        return 0 if record is None else record.failures

    def met(self, now: float, members: Collection[IncarnationId]) -> None:
        """An attempt with these members is committed. One alone proves nothing."""
        if len(members) > 1:
            self._doubted.difference_update(members)
            self._records = {x: record for x, record in self._records.items() if x not in members}
        self.released(now)

    def released(self, now: float) -> None:
        """The search of a round has ended: from now on pauses pass."""
        for record in self._records.values():
            if record.until_s == math.inf:
                record.until_s = now + record.pause_s

    def forget(self, gone: IncarnationId) -> None:
        old = dict([gone])
        self._doubted.discard(gone)
        self._records = {x: record for x, record in self._records.items() if not is_gone(x, old)}

    def rest_s(self, now: float, incarnation_id: IncarnationId) -> float:
        """For how many seconds more it sits out, inf: until others have made a version; 0: it does not."""
        record = self._records.get(incarnation_id)
        return 0.0 if record is None else max(0.0, record.until_s - now)

    def since_s(self, incarnation_id: IncarnationId) -> float:
        """Since when it has sat out, the last time."""
        record = self._records.get(incarnation_id)
        return -math.inf if record is None else record.since_s

    def __bool__(self) -> bool:
        return bool(self._records)
