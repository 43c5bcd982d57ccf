"""Members that are away, and hold the newest version of a fragment alone: nothing can be committed before one of them
is back, or all are given up (ROLLBACK).

A process that lives connects again within a second when its connection has ended; one that is cut off, or frozen, falls
silent instead. So the end of a connection is the end of its process if it stays away for ``recovery_s``: what it held
is lost, and waiting longer for it only keeps the others from what they can still commit. Where nobody who is connected
holds any state, that would be the end of the job, and a member that resumes from a checkpoint may still come.
"""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members.members import Members
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit, SendTo
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.settings import Sync

LOST_WITH_IT = "its connection has ended, it is away for longer than recovery_s, and only it held the newest version"


class OnlyHolders:
    """Who they are, how long the job waits for them, and who was told."""

    def __init__(self, members: Members) -> None:
        self._members, self._roster = members, members.roster
        self._told = set[int]()
        self._named: tuple[m.IncarnationId, ...] = ()

    def find(self) -> list[Member]:
        """By id; empty in nearly all cases, which costs a look at a member."""
        here = self._roster.connected()
        lacking = [r.at for r in self._members.rounds if here and not self._roster.is_held(r.at)]
        return [x for x in self._roster.away() if any(map(x.may_hold, lacking))] if lacking else []

    def given_up_s(self, sync: Sync) -> dict[m.IncarnationId, float]:
        """When each of them is given up, if it is earlier than after ``gone_after_s``."""
        found = [x for x in self.find() if x.hung_up]
        if not found or not any(map(self._trains, self._roster.connected())):
            return {}
        patience_s = min(sync.derived.recovery_s, sync.gone_after_s)
        return {x.incarnation_id: x.lost_s + patience_s for x in found}

    def _trains(self, member: Member) -> bool:
        """Whether it has a state of every fragment, of whatever version."""
        held = len(member.held) == len(self._members.rounds) or member.in_doubt
        return held and member.state not in ("starting", "fetching")

    def tell(self, now: float, sync: Sync) -> Effects:
        """Says once to everybody who is connected what is waited for, and how long at most."""
        found = self.find()
        named = tuple(x.incarnation_id for x in found)
        if named != self._named:
            self._named, self._told = named, set()
        if not found:
            return []
        early = self.given_up_s(sync)
        due_s = max(early.get(x.incarnation_id, x.lost_s + sync.gone_after_s) for x in found)
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
