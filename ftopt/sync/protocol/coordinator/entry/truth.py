"""The true state, from which a job goes on when its startup phase ends, according to the journal and the hellos."""

from __future__ import annotations

from collections import Counter

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.heard import Heard
from ftopt.sync.protocol.coordinator.roster.effects import Decided, Effects, JournalState, Rollback
from ftopt.sync.protocol.coordinator.rounds.versions import Versions
from ftopt.sync.protocol.intervals import Ranges


class Truth:
    """The newest version of each fragment, and the granted samples, as the journal (``saved``) and the replicas that
    are here (``heard``) know them. ``decided``: the journal's decisions, oldest first."""

    def __init__(self, heard: Heard, saved: JournalState | None) -> None:
        self._heard = heard
        self.decided = saved.decided if saved else ()
        self._cursor, self._epoch = (saved.cursor, saved.epoch) if saved else (0, 0)
        self._fresh: tuple[dict[int, int], bool] | None = None

    def journal_knows_all(self) -> bool:
        """Whether the journal knows every reported version; else it is an old copy."""
        best = self._heard.best()
        if self._fresh is None or self._fresh[0] is not best:
            tops = {d.fragment: d.version for f in best for d in self.saved(f)}
            self._fresh = best, all(tops.get(f, -1) >= version for f, version in best.items())
        return self._fresh[1]

    def saved(self, fragment: int) -> list[Decided]:
        """The journal's decisions of one fragment, oldest first; none if the journal is of another start of the job, or
        from before a rollback."""
        decided = [] if self._is_of_another_branch() else [d for d in self.decided if d.fragment == fragment]
        chains = [p.chain for _, positions in self._heard.reports for p in positions if p.fragment == fragment]
        known = not chains or any(m.same_start(chain, d.chain) for chain in chains for d in decided[-1:])
        return decided if known else []

    def _is_of_another_branch(self) -> bool:
        """Whether the journal is an old copy from before a rollback: replicas that know a later epoch hold another
        branch."""
        later = [p for epoch, positions in self._heard.reports if epoch > self._epoch for p in positions]
        chains = {(d.fragment, d.version): d.chain for d in self.decided} if later else {}
        return any(chains.get((p.fragment, p.version), p.chain) != p.chain for p in later)

    def restore(self, versions: Versions) -> Effects:
        """Sets the highest version of one fragment that the journal or a replica knows; returns what to journal.

        Of several branches the journal's is the true one; without a journal, that of most replicas.
        """
        f, saved = versions.fragment, self.saved(versions.fragment)
        holders = self._heard.state_holders.values()
        reports = [(p, h.inner_step) for h in holders for p in h.positions if p.fragment == f]
        top = max((p.version for p, _ in reports), default=-1)
        if saved and saved[-1].version >= top:
            versions.restore(saved[-1], saved)
            return []
        votes = Counter(p for p, _ in reports if p.version == top)
        at = min(votes, key=lambda p: (-votes[p], p.chain))
        inner_step = max(inner_step for p, inner_step in reports if p == at)
        done = () if f else next(h.done for h in self._heard.hellos.values() if at in h.positions)
        found = Decided(f, top, 0, "", at.chain, inner_step, (), done)
        versions.restore(found, saved)
        return [Rollback(f, top - 1), found]

    def cold_start(self, versions: Versions, last_attempt: int) -> Effects:
        """COLD: makes the state of one member version 0, journalled like any decision."""
        f, source = versions.fragment, self._heard.hellos[self.initial_source()]
        chain = m.first_chain(f, last_attempt, source.replica, source.initial)
        start = Decided(f, 0, 0, source.initial, chain, source.inner_step, (), () if f else source.done)
        versions.restore(start)
        return [Rollback(f, -1), start]

    def shares(self, at: m.Position) -> dict[m.IncarnationId, tuple[int, Ranges]]:
        """RESTART: the last plan and share that each holder of ``at`` has received."""
        return {
            (h.replica, h.incarnation): (h.plan, h.units)
            for h in self._heard.hellos.values()
            if h.incarnation and at in h.positions and h.units
        }

    def cursor(self) -> int:
        """CURSOR: no unit from here on was granted, as far as journal and replicas know."""
        return max(self._cursor, *(h.cursor for h in self._heard.hellos.values()))

    def initial_source(self) -> int:
        """The connection whose state becomes version 0 at a cold start: the first by id, with spares last, and fresh
        replicas before those that have held a state."""
        found = self._heard.hellos
        return min(found, key=lambda conn: (found[conn].standby, not found[conn].initial, found[conn].replica))
