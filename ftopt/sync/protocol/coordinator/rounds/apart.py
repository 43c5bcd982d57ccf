"""Members that should hold the same but do not: which state to go on with, and which members differ.

Results of one attempt are compared; so are live models and inner states with a method that keeps replicas equal.
Replicas whose machines compute other bits cannot stay equal: they are made equal, and none is at fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftopt.sync.protocol import messages as m


@dataclass(frozen=True, slots=True)
class Apart:
    """Live states that differ. ``like``: members with the state that is kept; the ``others`` fetch it. ``faulty``:
    replica -> reason, for members that differ from machines of their own kind."""

    like: tuple[str, ...]
    others: tuple[str, ...]
    faulty: Mapping[str, str]


def chosen(digests: Mapping[str, str], reports: Mapping[str, m.Prepared], alive: Iterable[str]) -> str:
    """The digest to go on with, among those of living members: most members'; then the one with the smaller peak,
    since a harmful bit flip makes a number larger; then the lowest rank's. ``digests``: in rank order."""
    votes, ranks = Counter(digests.values()), list(digests)
    living = [replica for replica in alive if replica in digests] or ranks
    best = min(living, key=lambda x: (-votes[digests[x]], reports[x].peak, ranks.index(x)))
    return digests[best]


def apart(reports: Mapping[str, m.Prepared], kinds: Mapping[str, str], alive: Iterable[str]) -> Apart | None:
    """Compares the reported live states. None: they are equal.

    Args:
        reports: of the members that agree on the result, in rank order.
        kinds: replica -> what its machine computes in a probe.
    """
    lives = {replica: report.live for replica, report in reports.items() if report.live}
    if len(set(lives.values())) < 2:
        return None
    keep, faulty = chosen(lives, reports, alive), dict[str, str]()
    for kind in dict.fromkeys(kinds.get(x, "") for x in lives):
        alike = {x: live for x, live in lives.items() if kinds.get(x, "") == kind}
        right = chosen(alike, reports, ())
        held_by = [x for x, live in alike.items() if live == right]
        for replica in (x for x, live in alike.items() if live != right):
            faulty[replica] = _reason(replica, held_by, list(alike.values()).count(alike[replica]), reports)
    like = tuple(x for x, live in lives.items() if live == keep)
    return Apart(like, tuple(x for x in lives if x not in like), faulty)


def _reason(replica: str, right: list[str], wrong: int, reports: Mapping[str, m.Prepared]) -> str:
    text = f"the model or inner state of {replica} is not what {', '.join(right)} hold, though all have taken the same "
    text += "steps: memory or arithmetic has failed there, or it trains at another rate; it fetches theirs"
    if wrong == len(right):
        text += (
            f" (one word against the other: the largest number is {reports[replica].peak:.3g} there, "
            f"{reports[right[0]].peak:.3g} here)"
        )
    return text
