"""Only holders: members that are away, and alone hold the newest version of a fragment. Nothing can be committed before
one of them is back, or all are evicted (ROLLBACK).

A living process connects again within a second when its connection has ended; a cut-off or frozen one falls silent
instead. So a process whose connection has ended is dead if it stays away for ``recovery_s``: its state is lost, and
waiting longer only keeps the others from committing. If no connected member holds a state, giving up would end the job,
and a member that resumes from a checkpoint may still come. But a job at version 0 has no steps to lose: it starts anew.
"""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members.members import Members
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit, SendTo
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.policy import FaultPolicy

LOST_WITH_IT = "its connection has ended, it is away for longer than recovery_s, and only it held the newest version"


class OnlyHolders:
    """Finds the only holders, limits the wait for them, and tells the others."""

    def __init__(self, members: Members) -> None:
        self._members, self._roster = members, members.roster
        self._told = set[int]()
        self._named: tuple[m.IncarnationId, ...] = ()

    def find(self) -> list[Member]:
        """The only holders, by id; nearly always none, which is found by a look at one member."""
        here = self._roster.connected()
        lacking = [r.at for r in self._members.rounds if here and not self._roster.is_held(r.at)]
        return [x for x in self._roster.away() if any(map(x.may_hold, lacking))] if lacking else []

    def given_up_s(self, policy: FaultPolicy) -> dict[m.IncarnationId, float]:
        """When each only holder is given up, for those given up before ``gone_after_s``."""
        found = [x for x in self.find() if x.hung_up]
        at_start = all(r.at.version == 0 for r in self._members.rounds)
        if not found or not (at_start or any(map(self._trains, self._roster.connected()))):
            return {}
        patience_s = min(policy.derived.recovery_s, policy.evict_after_s)
        return {x.incarnation_id: x.lost_s + patience_s for x in found}

    def _trains(self, member: Member) -> bool:
        """Whether a member has a state of every fragment, of any version."""
        held = len(member.held) == len(self._members.rounds) or member.in_doubt
        return held and member.state not in ("starting", "fetching")

    def tell(self, now: float, policy: FaultPolicy) -> Effects:
        """Tells each connected member once what the job waits for, and how long at most."""
        found = self.find()
        named = tuple(x.incarnation_id for x in found)
        if named != self._named:
            self._named, self._told = named, set()
        if not found:
            return []
        early = self.given_up_s(policy)
        due_s = max(early.get(x.incarnation_id, x.lost_s + policy.evict_after_s) for x in found)
        names, left_s = [x.replica for x in found], max(0.0, due_s - now)
        effects: Effects = [] if self._told else [Emit("awaited", data={"for": names, "at_most_s": round(left_s, 3)})]
        text = (
            f"no connected replica holds the newest version, and {', '.join(names[:5])} may: outer steps and joins "
            f"wait for that, {left_s:.0f} s at most, and replicas that train go on; then the job goes on from what "
            "others hold"
        )
        for x in self._roster.connected():
            if x.conn not in self._told and x.conn is not None:
                self._told.add(x.conn)
                effects.append(SendTo(x.conn, m.Hold(text)))
        return effects
