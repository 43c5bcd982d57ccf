"""What a fault is: who, when, where, what. The same fields in Python and in a recipe's ``faults``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COORDINATOR = "coordinator"
POINTS = ("inner", "propose", "gather", "reduce", "reduce.after", "prepare", "commit", "apply", "fetch", "serve")
COORDINATOR_POINTS = ("join", "quorum", "decide", "abort")
ACTIONS = ("kill", "stop", "hang")
LATER = ("partition", "corrupt", "nan", "slow")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. It strikes once, at the first event named ``point`` from inner step ``at_step`` on.

    Args:
        replica: index in the recipe's replicas, a replica's id, or ``coordinator``.
        point: the event at which it strikes, before that event's effect (``reduce.after``: behind it).
        do: ``kill`` (SIGKILL), ``stop`` (SIGSTOP for ``for_s``), ``hang`` (the training thread sleeps ``for_s``).
        at_step: the replica's inner step (the coordinator's: the committed one) from which on the fault waits.
        for_s: seconds that ``stop`` and ``hang`` last.
        rejoin_s: seconds until ``ftopt run`` starts a killed process again; null: never.
        incarnation: the life of the replica that it aims at; 1 is the first, 2 its successor.
        journal: ``keep`` or ``delete``, for a killed coordinator that rejoins.

    Raises:
        ValueError: a combination that cannot strike; the message says what is allowed.
    """

    replica: int | str = 0
    point: str = "inner"
    do: str = "kill"
    at_step: int = 0
    for_s: float | None = None
    rejoin_s: float | None = None
    incarnation: int = 1
    journal: str = "keep"

    def __post_init__(self) -> None:
        coordinator = self.replica == COORDINATOR
        points = COORDINATOR_POINTS if coordinator else POINTS
        if self.point not in points:
            raise ValueError(f"point={self.point!r} of {self.replica!r}; allowed: {', '.join(points)}")
        if self.do in LATER:
            raise ValueError(f"do={self.do!r} is not available yet; allowed: {', '.join(ACTIONS)}")
        if self.do not in ACTIONS:
            raise ValueError(f"do={self.do!r}; allowed: {', '.join(ACTIONS)}")
        if coordinator and self.do == "hang":
            raise ValueError("do='hang' of the coordinator, which has no training thread; allowed: kill, stop")
        if self.do == "kill" and self.for_s is not None:
            raise ValueError(f"for_s={self.for_s:g} with do='kill' has no effect; use rejoin_s for the way back")
        if self.do != "kill" and not (self.for_s is not None and self.for_s > 0):
            raise ValueError(f"for_s={self.for_s} with do={self.do!r}; must be a number of seconds above 0")
        if self.rejoin_s is not None and (self.do != "kill" or self.rejoin_s < 0):
            raise ValueError(f"rejoin_s={self.rejoin_s:g} with do={self.do!r}; for kill only, and at least 0")
        if self.at_step < 0 or self.incarnation < 1:
            raise ValueError(f"at_step={self.at_step}, incarnation={self.incarnation}; at least 0, at least 1")
        if self.point == "fetch" and self.incarnation < 2:
            raise ValueError("point='fetch' with incarnation=1, which has nothing to fetch; use incarnation=2 or above")
        if self.journal not in ("keep", "delete"):
            raise ValueError(f"journal={self.journal!r}; allowed: keep, delete")

    def target(self, ids: Sequence[str]) -> str | None:
        """The id of the process that it aims at, None if there is none among ``ids``."""
        if self.replica == COORDINATOR:
            return COORDINATOR
        if isinstance(self.replica, int):
            return ids[self.replica] if 0 <= self.replica < len(ids) else None
        return self.replica if self.replica in ids else None
