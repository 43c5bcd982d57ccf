"""Logs with which replicas a replica averages: those missing in a version, back again, or new."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from ftopt.common.plural import count
from ftopt.sync.protocol import messages as m

_log = logging.getLogger(__name__)
_NAMED = 8  # the log names this many, and counts the others


def listed(names: Sequence[str]) -> str:
    """Lists the names, or the first ones of many."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class Peers:
    """Looks at each version that this replica commits. If a peer is missing repeatedly, it logs the first, the second,
    the fourth time, and so on.

    Args:
        replica: its id.
    """

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._known: set[str] = set()
        self._missing: set[str] = set()
        self._told: set[str] = set()
        self._gone: set[str] = set()  # gone before an outer step with this replica
        self._times = Counter[str]()
        self._before: dict[int, frozenset[str]] = {}
        self._met: frozenset[m.IncarnationId] = frozenset()
        self._last: dict[int, frozenset[m.IncarnationId]] = {}

    def last(self, fragment: int) -> frozenset[str]:
        """The members of the last version of a fragment."""
        return self._before.get(fragment, frozenset())

    def gone(self, ids: Iterable[m.IncarnationId]) -> None:
        """Notes incarnations that will not come back; their replicas may, as later incarnations."""
        self._gone |= {replica for replica, _ in ids} - self._known - {self._replica}

    def committed(self, fragment: int, version: int, members: Sequence[m.IncarnationId]) -> dict[str, list[str]]:
        """``members``: of the attempt that made the version; empty if the connection was lost before the commit was
        heard. Returns members that this replica has not met before (``joined``; a new life of a known replica counts),
        and replicas that were in the version before but are not in this one (``absent``)."""
        if not members:
            return {"joined": [], "absent": []}
        ids, known = frozenset(members), self._met
        self._met = known | ids
        joined = sorted(replica for replica, _ in ids - known) if known else []
        self._say_who(fragment, version, members)
        absent, self._last[fragment] = self._last.get(fragment, ids) - ids, ids
        gone = {replica for replica, _ in absent} - {replica for replica, _ in ids}
        return {"joined": joined, "absent": sorted(gone)}

    def _say_who(self, fragment: int, version: int, members: Sequence[m.IncarnationId]) -> None:
        now = frozenset(replica for replica, _ in members)
        first = not self._known
        missing = self._before.get(fragment, now) - now - self._missing
        back, new = now & self._missing & self._told, frozenset[str]() if first else now - self._known
        again = {replica for replica, incarnation in members if replica in new and incarnation > 1}
        self._before[fragment] = now
        self._known |= now
        which = f"{version} of fragment {fragment}" if fragment or len(self._before) > 1 else f"{version}"
        self._missing = (self._missing | missing) - now
        self._times.update(missing)
        tell = {replica for replica in missing if not self._times[replica] & (self._times[replica] - 1)}
        self._say(logging.WARNING, which, "without %s", tell, now)
        self._say(logging.WARNING, which, "without %s, gone before an outer step with this one", self._gone - now, now)
        self._gone = set()
        self._say(logging.WARNING, which, "with %s again", back | again, now)
        self._told = (self._told | tell) - now
        self._say(logging.INFO, which, "with %s, new in the job", new - again, now)

    def _say(self, level: int, which: str, how: str, who: Iterable[str], now: frozenset[str]) -> None:
        if names := sorted(who):
            how %= listed(names)
            took_part = f"{count(len(now), 'replica')} took part"
            _log.log(level, "replica %s: version %s is averaged %s; %s", self._replica, which, how, took_part)
