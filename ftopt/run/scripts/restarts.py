"""Which replicas that have died are started again."""

from __future__ import annotations

from collections import Counter

from ftopt.run.processes import Child
from ftopt.run.scripts.ends import Ends
from ftopt.run.scripts.plan import Plan

_SOON_S = 30.0
"""A replica whose script fails sooner may fail again."""
_MOST_SOON = 3
"""Such failures in a row, after which it is not started again."""


class Restarts:
    """The restarts of one launch's replicas.

    Attributes:
        times: how often each one was started again.
    """

    def __init__(self, plan: Plan, ends: Ends) -> None:
        self.times = Counter[str]()
        self._plan, self._ends, self._soon = plan, ends, Counter[str]()

    def why_not(self, child: Child, status: int, lived_s: float, *, joined: bool) -> str:
        """Why a replica that died after ``lived_s`` is not started again; "": it is. ``joined``: it has ever."""
        if child.name in self._ends.repeated:
            return "it has failed again and again at the same inner step, at the same line"
        if child.name in self._ends.mistakes:
            return "no restart can mend that"
        if self._ends.done:
            return "others have come to the end of the script"
        if child.name in self._ends.early:
            return "it was asked to leave"
        if self.times[child.name] >= self._plan.restarts:
            return f"--restarts is {self._plan.restarts}"
        by_itself = status > 0 and not self._ends.was_killed(child)
        soon = by_itself and lived_s < _SOON_S
        if by_itself and not joined and not self._plan.join:  # it would fail again
            return "it had not joined the job"
        if soon and self._plan.join:
            return f"it has lived for less than {_SOON_S:.0f} s"
        self._soon[child.name] = self._soon[child.name] + 1 if soon else 0
        if self._soon[child.name] >= _MOST_SOON:
            return f"its script has failed {_MOST_SOON} times in a row, each time within {_SOON_S:.0f} s"
        return ""
