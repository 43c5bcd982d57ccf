"""Which members are slow: their steps take much longer than usual, and the others wait for them.

With ``s`` as the time of a member's step, by its heartbeats (without outer
steps, and without single long breaks); ``u``, the usual time, is the lower median of ``s`` over the members; ``s / u``
is the member's *factor* (`speed`). A member becomes slow when in `TIMES` heartbeats in a row, each after another inner
step, and for `LASTS_S`,

    s / u >= SLOW   and   s / u >= SLOW * (its factor so far)   or a round has waited for it

and others that wait for it have lost `COSTS_S`: the share ``1 - u / s`` of the time since the first of these heartbeats
and of the `WINDOW` steps that it reports on. (Steps of milliseconds take twice as long now and then on a busy machine,
so they must be long for a while.) It is up to speed again after as many heartbeats of ``s / u < FAST``.

A machine that has always been slower is not slow before others wait for it. Speeds are hints like `readings`: they are
not journalled, and a new coordinator measures them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit, SendTo
from ftopt.sync.protocol.coordinator.roster.listener import Listener
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.policy import FaultPolicy

TIMES, LASTS_S = 3, 2.0
COSTS_S = 5.0
WINDOW = 16
"""Steps over which a replica takes the mean."""
MOST = 1e6
"""The largest factor, since a replica may report steps of almost no time."""
REFRESH_S = 0.2
"""Seconds between two computations of the usual time, however many members there are."""
MIN_STEPS = 4
"""A round of fewer inner steps waits for everybody: the steps are too few for calling anybody in early."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When the others are expected in a round: ``round_s`` after ``began_s``, as in the round before."""

    began_s: float
    round_s: float

    def call_s(self, x: Member) -> float:
        """When a slow member is called in: one and a half of its steps before the others are expected."""
        return self.began_s + self.round_s - 1.5 * x.step_s

    def is_worth_waiting_for(self, x: Member) -> bool:
        """Whether a step of a slow member is no more than a quarter of a round."""
        return x.step_s <= self.round_s / 4

    @property
    def overdue_s(self) -> float:
        """From when on proposals of slow members count like the others': the others hang, or this round is longer than
        the last one."""
        return self.began_s + 2 * self.round_s


class Speeds(Listener):
    """Watches all members. ``connected``: returns those connected. ``calls_in``: rounds may call slow members in
    early."""

    def __init__(self, connected: Callable[[], Iterable[Member]]) -> None:
        self._connected = connected
        self.calls_in = False
        self._rounds: dict[int, bool] = {}
        self._slow: dict[m.IncarnationId, Member] = {}
        self._usual_s = 0.0
        self._count = 0
        self._made_s = -math.inf

    def define(self, policy: FaultPolicy) -> None:
        self.calls_in = policy.stragglers == "call_in"
        self._rounds.clear()

    def finished(self, fragment: int, proposals: Mapping[str, m.Contribution]) -> bool:
        """Notes the end of a round; returns whether the next ones may call slow members in early: not if each step is
        averaged, or contributions must be of one step."""
        contributions = proposals.values()
        steps = max((c.steps for c in contributions), default=0)
        free = not any(c.gradients or c.at_step for c in contributions)
        self._rounds[fragment] = self.calls_in and free and steps >= MIN_STEPS
        return self._rounds[fragment]

    def slow(self) -> list[Member]:
        """Connected slow members."""
        if not self._slow:
            return []
        self._slow = {key: x for key, x in self._slow.items() if x.conn is not None and x.speed.slow}
        return list(self._slow.values())

    def admitted(self, member: Member, hello: m.Hello) -> Effects:
        member.speed.turned = 0
        if member.speed.slow:
            self._slow[member.incarnation_id] = member
        return []

    def heard(self, now: float, x: Member) -> Effects:
        """Takes a heartbeat. O(1), apart from the usual time."""
        speed = x.speed
        if x.state != "training" or x.inner_step == speed.seen_step or not x.step_s:
            return []  # nothing new: it waits, evaluates, or is in a long step
        # Without others to compare with, a slow member's own speed is the usual one. Else each of its rounds, called
        # in early, would be shorter than the one before.
        usual_s = self._usual(now) or (x.step_s if speed.slow else 0.0)
        if not usual_s:
            return []
        speed.seen_step, speed.factor = x.inner_step, min(x.step_s / usual_s, MOST)
        if not speed.turns():
            speed.turned = 0
            if not speed.slow:
                speed.learn()
            return []
        speed.turned += 1
        if speed.turned == 1:
            speed.turned_s = now
        if speed.turned < TIMES or now < speed.turned_s + LASTS_S:
            return []
        if not speed.slow and not (self._costs(now, x, usual_s) and self._may_be_one_more()):
            return []
        return self._turn(now, x, usual_s)

    @staticmethod
    def _costs(now: float, x: Member, usual_s: float) -> bool:
        """Whether others that wait for the member have lost enough time to call it slow."""
        since_s = now - x.speed.turned_s + WINDOW * x.step_s
        return since_s * (1 - usual_s / x.step_s) >= COSTS_S

    def _may_be_one_more(self) -> bool:
        """Whether another member may be slow: at most half are, since the others define the usual time."""
        return 2 * (len(self.slow()) + 1) <= self._count

    def _turn(self, now: float, x: Member, usual_s: float) -> Effects:
        """Moves a member to the other state, which an event and the member's own log report."""
        speed = x.speed
        speed.slow, speed.turned = not speed.slow, 0
        if speed.slow:
            self._slow[x.incarnation_id], speed.since_s = x, speed.turned_s
        else:
            self._slow.pop(x.incarnation_id, None)
            speed.kept_waiting = False
        told = m.Speed(
            slow=speed.slow,
            factor=round(speed.factor, 2),
            step_s=x.step_s,
            usual_s=usual_s,
            before=round(speed.before, 2),
            for_s=round(now - speed.since_s, 1),
            called_in=speed.slow and self.calls_in and (not self._rounds or any(self._rounds.values())),
        )
        name, data = "slow" if speed.slow else "up_to_speed", asdict(told)
        del data["slow"]
        event = Emit(name, *x.incarnation_id, data=data)
        return [event] if x.conn is None else [event, SendTo(x.conn, told)]

    def _usual(self, now: float) -> float:
        """The lower median of all members' step times; 0: there is only one member."""
        if now >= self._made_s + REFRESH_S:
            known = sorted(x.step_s for x in self._connected() if x.step_s and not x.leaving)
            self._count = len(known)
            self._usual_s, self._made_s = known[(len(known) - 1) // 2] if len(known) > 1 else 0.0, now
        return self._usual_s
