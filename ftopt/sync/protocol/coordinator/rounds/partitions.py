"""Members that cannot reach each other although both reach the coordinator, and which of them take part.

An attempt with both ends of a partition fails, `dead_after_s` after it began. So a pair that has failed twice without
meeting in between is kept apart beyond the round: only one of the two is a member of an attempt. The pair is tried
again ``dead_after_s`` after the next version. Each further failure doubles this pause, up to `PAUSES` times
``dead_after_s``, so that a lasting partition costs one failed attempt per pause. It is forgotten when an attempt with
both commits, or when one of the two is gone.

A member that two others, which can work together, cannot reach is assumed to reach nobody: it is kept apart from all
members at once, and one failure doubles its pause. It is forgotten when it commits with anybody.

A member that sits out keeps its contribution, and its claim grows with each round, so that none sits out forever. A
failed attempt between it and another member counts as its turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from ftopt.sync.protocol.coordinator.roster.effects import Effects
from ftopt.sync.protocol.coordinator.roster.listener import Listener
from ftopt.sync.protocol.coordinator.roster.roster import PAUSES, Member, Roster
from ftopt.sync.protocol.coordinator.rounds.suspects import Suspects
from ftopt.sync.protocol.messages import IncarnationId, is_gone


@dataclass
class _Partition:
    """A pair kept apart. ``until_s``: the two are not tried together before; ``pause_s``: the last pause."""

    failures: int = 0
    pause_s: float = 0.0
    until_s: float = -math.inf

    def keep(self, dead_after_s: float) -> None:
        """Keeps the two apart until the next version, and twice as long after it as the last time."""
        self.pause_s = min(max(2 * self.pause_s, dead_after_s), PAUSES * dead_after_s)
        self.until_s = math.inf


class Partitions(Listener):
    """The pairs of one job that cannot reach each other, the same for all fragments. ``suspects``: members that may be
    the cause of failures that name no peer."""

    def __init__(self) -> None:
        self.suspects = Suspects()
        self._partitions: dict[frozenset[IncarnationId], _Partition] = {}
        self._reports = Counter[IncarnationId]()
        self._failures = Counter[IncarnationId]()
        self._lonely: dict[IncarnationId, _Partition] = {}
        self._dead_after_s = 0.0

    def failed(self, now: float, a: IncarnationId, b: IncarnationId, *, dead_after_s: float) -> float:
        """Notes that an attempt with both failed because ``a`` could not reach ``b``. Returns for how many seconds
        after the next version they are now kept apart; 0: they are not."""
        pair = self._partitions.setdefault(frozenset((a, b)), _Partition())
        lonely = [self._lonely[x] for x in (a, b) if x in self._lonely]
        apart = lonely[0] if len(lonely) == 1 else pair
        self._failures.update((a, b))
        if now < max(pair.until_s, apart.until_s):
            return 0.0  # begun before they were kept apart, or with too few others
        pair.failures += 1
        self._reports[a] += 1
        self._dead_after_s = dead_after_s
        if apart is pair and pair.failures < 2:
            return 0.0
        apart.keep(dead_after_s)
        return apart.pause_s

    def met(self, now: float, members: Collection[IncarnationId]) -> None:
        """Forgets partitions between the members of a committed attempt."""
        self.suspects.met(now, members)
        for x in members if len(members) > 1 else ():
            self._reports.pop(x, None)
            self._lonely.pop(x, None)
        if self._partitions:
            met = set(members)
            self._partitions = {pair: x for pair, x in self._partitions.items() if not pair <= met}
            cut = Counter(x for pair in self._partitions if len(pair - met) == 1 for x in pair - met)
            for x in [x for x, count in cut.items() if count > 1 and x not in self._lonely]:
                self._lonely[x] = _Partition()
                self._lonely[x].keep(self._dead_after_s)
        self.released(now)

    def released(self, now: float) -> None:
        """Starts the pauses, since a round has ended."""
        self.suspects.released(now)
        for x in (*self._partitions.values(), *self._lonely.values()):
            if x.until_s == math.inf:
                x.until_s = now + x.pause_s

    def gone(self, incarnation_id: IncarnationId, member: Member | None, adopter: IncarnationId | None) -> Effects:
        self.suspects.forget(incarnation_id)
        self._reports.pop(incarnation_id, None)
        self._failures.pop(incarnation_id, None)
        old = dict([incarnation_id])
        self._partitions = {p: x for p, x in self._partitions.items() if not any(is_gone(one, old) for one in p)}
        self._lonely = {one: x for one, x in self._lonely.items() if not is_gone(one, old)}
        return []

    def reports(self, incarnation_id: IncarnationId) -> int:
        """How often a member has named a peer that it could not reach, since it last met others."""
        return self._reports[incarnation_id]

    def failures(self, incarnation_id: IncarnationId) -> int:
        """Number of attempts that have failed between a member and another one."""
        return self._failures[incarnation_id]

    def unreachable(
        self, now: float, incarnation_ids: Collection[IncarnationId]
    ) -> dict[IncarnationId, set[IncarnationId]]:
        """Member -> the members that it must not meet in an attempt now; without members that may meet all."""
        found: dict[IncarnationId, set[IncarnationId]] = {}
        among = set(incarnation_ids) if self._partitions else set[IncarnationId]()
        for pair, x in self._partitions.items():  # few, if any
            if now < x.until_s and pair <= among:
                for incarnation_id in pair:
                    found.setdefault(incarnation_id, set()).update(pair - {incarnation_id})
        for lonely, x in self._lonely.items():
            if now < x.until_s and lonely in among:
                for peer in among - {lonely}:
                    found.setdefault(peer, set()).add(lonely)
                    found.setdefault(lonely, set()).add(peer)
        return found


class Membership:
    """Which members take part in the attempts of one fragment."""

    def __init__(self, partitions: Partitions, roster: Roster) -> None:
        self._partitions = partitions
        self._roster = roster
        self._sat_out: dict[IncarnationId, tuple[int, int]] = {}
        """Member -> decided rounds in which it has proposed since it was last in the quorum, and its failures then."""

    def choose(self, now: float, proposers: list[Member]) -> list[Member]:
        """Chooses all proposers, except that of two that cannot meet only one takes part: the one that keeps out fewer
        others and has waited longer; then the one that has reported fewer failures, since a member whose own interface
        is down complains first; then by id.

        Each round of waiting weighs as much as one member kept out. A member that reaches nobody has its turn after as
        many rounds as it has peers; of two that cannot reach each other, each has every other round.
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
            claim = shut_out - self._waited(x.incarnation_id)
            return claim, self._partitions.reports(x.incarnation_id), x.replica

        for x in sorted(proposers, key=order):
            if not unreachable.get(x.incarnation_id, set()) & chosen:
                chosen.add(x.incarnation_id)
        return [x for x in proposers if x.incarnation_id in chosen]

    def _waited(self, incarnation_id: IncarnationId) -> int:
        """Number of rounds that a member has sat out since its last turn."""
        rounds, failures = self._sat_out.get(incarnation_id, (0, 0))
        return rounds if failures == self._partitions.failures(incarnation_id) else 0

    def taken(self, members: Collection[IncarnationId], proposed: Collection[str]) -> None:
        """Counts a round that has ended with these ``members``; the replicas in ``proposed`` had proposed."""
        sat_out = {}
        for x in self._roster.members.values():
            rounds = self._waited(x.incarnation_id) + (x.replica in proposed)
            if rounds and x.incarnation_id not in members:
                sat_out[x.incarnation_id] = rounds, self._partitions.failures(x.incarnation_id)
        self._sat_out = sat_out
