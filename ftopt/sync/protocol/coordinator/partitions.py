"""Members that cannot reach each other although both reach the coordinator, and which of them take part.

An attempt with both ends of a partition fails, `dead_after_s` after it began. So a pair that has failed twice without
having met in between is kept apart beyond the round: only one of the two is a member of an attempt. They are tried
together again after ``dead_after_s``, and after each further failure when twice as long has passed, `PAUSES` times
``dead_after_s`` at most: a partition that lasts costs one failed attempt in so long. It is forgotten when an attempt
with both commits, or when one of the two is gone.

A member that sits out keeps its contribution, and its claim grows with each round: none sits out forever.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from ftopt.sync.protocol.coordinator.roster import Member, Roster
from ftopt.sync.protocol.coordinator.suspects import PAUSES, Suspects
from ftopt.sync.protocol.messages import IncarnationId, is_gone


@dataclass
class _Partition:
    """``until_s``: the two are not tried together before; ``pause_s``: how long they were not, the last time."""

    failures: int = 0
    pause_s: float = 0.0
    until_s: float = -math.inf


class Partitions:
    """The pairs of one job that cannot reach each other: the same for all fragments. ``suspects``: its members whose
    reductions fail and who name no peer."""

    def __init__(self) -> None:
        self.suspects = Suspects()
        self._partitions: dict[frozenset[IncarnationId], _Partition] = {}
        self._reports = Counter[IncarnationId]()

    def failed(self, now: float, a: IncarnationId, b: IncarnationId, *, dead_after_s: float) -> float:
        """An attempt with both has failed because ``a`` could not reach ``b``. Returns for how many seconds they are
        kept apart from now on, 0 if they are not."""
        pair = self._partitions.setdefault(frozenset((a, b)), _Partition())
        if now < pair.until_s:
            return 0.0  # begun before they were kept apart
        pair.failures += 1
        self._reports[a] += 1
        if pair.failures < 2:
            return 0.0
        pair.pause_s = min(max(2 * pair.pause_s, dead_after_s), PAUSES * dead_after_s)
        pair.until_s = now + pair.pause_s
        return pair.pause_s

    def met(self, now: float, members: Collection[IncarnationId]) -> None:
        """An attempt with these members is committed."""
        self.suspects.met(now, members)
        for x in members if len(members) > 1 else ():
            self._reports.pop(x, None)
        if self._partitions:
            met = set(members)
            self._partitions = {pair: x for pair, x in self._partitions.items() if not pair <= met}

    def forget(self, gone: IncarnationId) -> None:
        self.suspects.forget(gone)
        self._reports.pop(gone, None)
        old = dict([gone])
        self._partitions = {p: x for p, x in self._partitions.items() if not any(is_gone(one, old) for one in p)}

    def reports(self, incarnation_id: IncarnationId) -> int:
        """How often it has named a peer that it could not reach, since it met others."""
        return self._reports[incarnation_id]

    def unreachable(
        self, now: float, incarnation_ids: Collection[IncarnationId]
    ) -> dict[IncarnationId, set[IncarnationId]]:
        """Each member -> those that it must not meet in an attempt now; without those that may meet all."""
        found: dict[IncarnationId, set[IncarnationId]] = {}
        among = set(incarnation_ids) if self._partitions else set[IncarnationId]()
        for pair, x in self._partitions.items():  # few, if any
            if now < x.until_s and pair <= among:
                for incarnation_id in pair:
                    found.setdefault(incarnation_id, set()).update(pair - {incarnation_id})
        return found


class Membership:
    """Which members take part in the attempts of one fragment."""

    def __init__(self, partitions: Partitions, roster: Roster) -> None:
        self._partitions = partitions
        self._roster = roster
        self._sat_out: dict[IncarnationId, int] = {}
        """Decided rounds in which a member has proposed, since it was last in the quorum."""

    def choose(self, now: float, proposers: list[Member]) -> list[Member]:
        """All, but of two that cannot meet the one that keeps out fewer others, and has waited longer; then the one
        that has reported fewer failures, since a member whose own interface is down complains first; then by id.

        Each round of waiting weighs as much as one member that must sit out instead. A member that reaches nobody has
        its turn after as many rounds as it has peers; of two that cannot reach each other each has every other one.
        Suspects are left out; if all are suspects, the one that has sat out longest tries it alone.
        """
        if self._partitions.suspects:
            suspects = self._partitions.suspects
            able = [x for x in proposers if not suspects.rest_s(now, x.incarnation_id)]
            proposers = able or sorted(proposers, key=lambda x: (suspects.since_s(x.incarnation_id), x.replica))[:1]
        unreachable = self._partitions.unreachable(now, [x.incarnation_id for x in proposers])
        if not unreachable:
            return proposers
        chosen: set[IncarnationId] = set()

        def order(x: Member) -> tuple[int, int, str]:
            shut_out = len(unreachable.get(x.incarnation_id, ()))
            claim = shut_out - self._sat_out.get(x.incarnation_id, 0)
            return claim, self._partitions.reports(x.incarnation_id), x.replica

        for x in sorted(proposers, key=order):
            if not unreachable.get(x.incarnation_id, set()) & chosen:
                chosen.add(x.incarnation_id)
        return [x for x in proposers if x.incarnation_id in chosen]

    def taken(self, members: Collection[IncarnationId], proposed: Collection[str]) -> None:
        """A round has ended: these were the members, those replicas had proposed."""
        sat_out = {}
        for x in self._roster.members.values():
            rounds = self._sat_out.get(x.incarnation_id, 0) + (x.replica in proposed)
            if rounds and x.incarnation_id not in members:
                sat_out[x.incarnation_id] = rounds
        self._sat_out = sat_out
