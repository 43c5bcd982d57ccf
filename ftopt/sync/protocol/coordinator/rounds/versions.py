"""The committed versions of one fragment: the current one, those before it, and its holders."""

from __future__ import annotations

from collections.abc import Iterable

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Decided
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.limits import HISTORY


class Versions:
    """The committed versions of one fragment. ``last``: the decision that made the current version, ``at``."""

    def __init__(self, fragment: int) -> None:
        self.fragment = fragment
        self._chains: dict[int, str] = {}
        self.restore(Decided(fragment, -1, 0, "", "", 0, ()))

    def restore(self, last: Decided, before: Iterable[Decided] = ()) -> None:
        """Goes on from ``last``, after a start, a restart or a rollback. ``before``: the journal's decisions."""
        known = self._chains | {d.version: d.chain for d in before}
        self._chains = {v: chain for v, chain in known.items() if v < last.version}
        self.advance(last)

    def advance(self, decided: Decided) -> None:
        self.last, self.at = decided, m.Position(self.fragment, decided.version, decided.chain)
        self._chains[decided.version] = decided.chain
        self._chains.pop(decided.version - HISTORY, None)

    def journalled(self) -> dict[str, object]:
        """The last decision, for an event: its own event may be lost with the coordinator that made it."""
        d = self.last
        told = {"fragment": d.fragment, "version": d.version, "chain": d.chain, "inner_step": d.inner_step}
        return told | {"members": [list(x) for x in d.members]}

    def held_by(self, member: Member) -> bool:
        return member.held.get(self.fragment) == self.at

    def off_branch(self, position: m.Position) -> bool:
        """CHAIN: whether a position is not on this history."""
        known = self._chains.get(position.version, position.chain)
        later = position.version > self.at.version
        return later or known != position.chain or not m.same_start(position.chain, self.at.chain)
