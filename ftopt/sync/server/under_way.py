"""What a round is doing, and which replicas it waits for: in words for people, and as a list for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftopt.sync.protocol.coordinator.roster.roster import Roster
from ftopt.sync.protocol.coordinator.rounds.rounds import Rounds
from ftopt.watch.sentences import names


def under_way(r: Rounds, roster: Roster) -> dict[str, Any]:
    """The state of a fragment's round, in addition to the machine's own status.

    ``waits_for``: ids of replicas, sorted. ``doing``: a sentence without a full stop.
    """
    if (attempt := r.attempt) is not None:
        waits_for = sorted(x for x, _ in attempt.members if x not in attempt.prepared and x not in attempt.lost)
        ready = len(attempt.members) - len(waits_for)
        doing = f"reducing: {ready} of {len(attempt.members)} have the result{_waits(waits_for)}"
        return {"waits_for": waits_for, "doing": doing}
    proposals = r.gather.proposals
    if not proposals:
        return {"waits_for": [], "doing": "no replica has proposed yet"}
    waits_for = [x.replica for x in roster.connected() if x.replica not in proposals and _is_awaited(r, x)]
    known, least = len(proposals) + len(waits_for), r.gather.policy.min_replicas
    needs = f"; it needs {least - known} more (min_replicas is {least})" if known < least else ""
    return {
        "waits_for": waits_for,
        "doing": f"{len(proposals)} of {known} {'has' if known == 1 else 'have'} proposed{_waits(waits_for)}{needs}",
    }


def _is_awaited(r: Rounds, x: Any) -> bool:
    """Whether `Waiting` awaits a member: a holder of the version that is at work, or one that fetches the version."""
    if x.standby:
        return False
    if r.versions.held_by(x):
        return not x.leaving and not x.stalled
    return r.fragment in x.catching_up


def _waits(replicas: Sequence[str]) -> str:
    return f"; it waits for {names(replicas, 5)}" if replicas else ""
