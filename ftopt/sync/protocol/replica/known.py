"""The incarnations of a job that a replica knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ftopt.sync.protocol import messages as m


@dataclass
class Known:
    """The incarnations that a replica knows, so that a coordinator without memory can learn of them.

    Args:
        roster: replica -> incarnation that the job counts on.
        gone: replica -> newest gone incarnation (FENCE).
        horizon: HORIZON, as told by the coordinator that sent the roster.
        adopted_by: missing replica -> the replica that adopts its pending work (ADOPT), after a checkpoint.
    """

    roster: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    horizon: m.Horizon = m.NONE_FORGOTTEN
    adopted_by: dict[str, str] = field(default_factory=dict)

    def learn(self, known: Iterable[m.IncarnationId], gone: Iterable[m.IncarnationId]) -> None:
        """Adds incarnations to the roster and to the gone ones."""
        for replica, incarnation in gone:
            self.gone[replica] = max(incarnation, self.gone.get(replica, 0))
        for replica, incarnation in known:
            self.roster[replica] = max(incarnation, self.roster.get(replica, 0))
        self.roster = {r: i for r, i in self.roster.items() if not m.is_gone((r, i), self.gone)}

    def take(self, welcome: m.Welcome) -> None:
        """Takes over what the coordinator knows, which includes all that was known here."""
        self.roster, self.gone, self.horizon = dict(welcome.roster), dict(welcome.gone), welcome.horizon

    def forget(self, update: m.RosterUpdate) -> None:
        """HORIZON: forgets gone incarnations that need not be named any more."""
        self.horizon = update.horizon if update.forgotten else self.horizon
        for replica in update.forgotten:
            self.gone.pop(replica, None)
