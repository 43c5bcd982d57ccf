"""Members that cannot reach each other although both reach the coordinator, and who of them takes part.

An attempt with both ends of a cut fails, `dead_after_s` after it began. So a pair that has failed twice without having
met in between is parted beyond the round: only one of the two is a member of an attempt. They are tried together again
after ``dead_after_s``, and after each further failure when twice as long has passed, `PAUSES` times ``dead_after_s`` at
most: a cut that lasts costs one failed attempt in so long. A cut is forgotten when an attempt with both goes through,
or when one of the two is gone.

Who sits out keeps its contribution, and its claim grows with each round: nobody sits out for ever.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ftopt.sync.protocol.coordinator.roster import Member, Roster
from ftopt.sync.protocol.messages import Mark, is_gone

PAUSES = 20
"""The longest pause before a pair is tried again, in units of ``dead_after_s``."""


@dataclass
class _Cut:
    """``until_s``: the two are not tried together before; ``pause_s``: how long they were not, the last time."""

    failures: int = 0
    pause_s: float = 0.0
    until_s: float = -math.inf


class Cuts:
    """One job's cuts: they are the network's, and the same for all fragments."""

    def __init__(self) -> None:
        self._cuts: dict[frozenset[Mark], _Cut] = {}

    def failed(self, now: float, a: Mark, b: Mark, *, dead_after_s: float) -> None:
        """An attempt with both has failed since one could not reach the other."""
        cut = self._cuts.setdefault(frozenset((a, b)), _Cut())
        if now < cut.until_s:
            return  # begun before they were parted
        cut.failures += 1
        if cut.failures >= 2:
            cut.pause_s = min(max(2 * cut.pause_s, dead_after_s), PAUSES * dead_after_s)
            cut.until_s = now + cut.pause_s

    def met(self, members: Collection[Mark]) -> None:
        """An attempt with these members went through."""
        if not self._cuts:
            return
        self._cuts = {pair: cut for pair, cut in self._cuts.items() if not pair <= set(members)}

    def forget(self, gone: Mark) -> None:
        """An incarnation is gone, and all before it."""
        self._cuts = {
            pair: cut for pair, cut in self._cuts.items() if not any(is_gone(mark, dict([gone])) for mark in pair)
        }

    def parted(self, now: float, marks: Collection[Mark]) -> dict[Mark, set[Mark]]:
        """Mark -> those of the others whom it must not meet in an attempt now; those with nobody are missing."""
        found: dict[Mark, set[Mark]] = {}
        for pair, cut in self._cuts.items():  # few, if any
            if now < cut.until_s and pair <= set(marks):
                for mark in pair:
                    found.setdefault(mark, set()).update(pair - {mark})
        return found


class Seats:
    """Who takes part in the attempts of one fragment."""

    def __init__(self, cuts: Cuts, roster: Roster) -> None:
        self._cuts = cuts
        self._roster = roster
        self._sat_out: dict[Mark, int] = {}
        """Rounds since it was last a member of what was decided, although it had proposed."""

    def choose(self, now: float, proposers: list[Member]) -> list[Member]:
        """All, but of two that are parted one: who keeps fewer others out, and has waited longer; then the first by id.

        Each round of waiting weighs as much as one member that must sit out instead. A member that reaches nobody has
        its turn after as many rounds as it has peers; of two that are cut from each other each has every other one.
        """
        parted = self._cuts.parted(now, [x.mark for x in proposers])
        if not parted:
            return proposers
        seated: set[Mark] = set()
        order = {x.mark: len(parted.get(x.mark, ())) - self._sat_out.get(x.mark, 0) for x in proposers}
        for x in sorted(proposers, key=lambda x: (order[x.mark], x.replica)):
            if not parted.get(x.mark, set()) & seated:
                seated.add(x.mark)
        return [x for x in proposers if x.mark in seated]

    def taken(self, members: Collection[Mark], proposed: Collection[str]) -> None:
        """A round has ended: these were the members, those replicas had proposed."""
        sat_out = {}
        for x in self._roster.members.values():
            rounds = self._sat_out.get(x.mark, 0) + (x.replica in proposed)
            if rounds and x.mark not in members:
                sat_out[x.mark] = rounds
        self._sat_out = sat_out
