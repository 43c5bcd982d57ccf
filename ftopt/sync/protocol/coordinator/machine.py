"""The coordinator side of the outer-sync protocol: a pure state machine for one job.

This file has its inputs, members' messages, and deadlines. `Hellos` answers replicas that connect; `Phases` has the
transitions between startup and the running job; `Members` handles changes of members; each fragment's `Rounds` do the
work.

Connections are numbers that the shell gives. Time is seconds on any steady clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.admission import Contenders
from ftopt.sync.protocol.coordinator.entry.hellos import Hellos
from ftopt.sync.protocol.coordinator.entry.phases import Phases
from ftopt.sync.protocol.coordinator.entry.startup import Startup
from ftopt.sync.protocol.coordinator.members.ending import Ending
from ftopt.sync.protocol.coordinator.members.losses import Lost
from ftopt.sync.protocol.coordinator.members.members import Members
from ftopt.sync.protocol.coordinator.members.only_holders import LOST_WITH_IT, OnlyHolders
from ftopt.sync.protocol.coordinator.roster.effects import Close, Decided, Effects, Emit, Finished, JournalState, SendTo
from ftopt.sync.protocol.coordinator.roster.horizon import KEPT
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.coordinator.rounds.assignment import Assignment
from ftopt.sync.protocol.coordinator.rounds.rounds import Rounds
from ftopt.sync.protocol.policy import FaultPolicy


class Coordinator:
    """The machine. Every input returns the effects that it causes, in the order in which they must happen.

    Args:
        job: the job's name.
        saved: the journal's state, if there is a journal.
        lost: the last version of fragment 0 that the job had, if it starts over without a journal.
        now: the clock.
        life: a number above that of any earlier life, even if its journal is lost (seconds since 1970), so that epochs
            are used once. Its fraction makes chains and attempt numbers differ from those of other jobs, too.
        reachable_s: since when replicas can reach it, on the clock of ``now``; minus infinity for a new job, which has
            no living replicas.
        kept_gone: number of gone incarnations that are remembered (HORIZON).
        since_1970_s: the offset of the clock of ``now`` to seconds since 1970, for people who read when a job failed.
    """

    def __init__(
        self,
        job: str,
        *,
        saved: JournalState | None = None,
        lost: Decided | None = None,
        now: float = 0.0,
        life: float = 1,
        reachable_s: float = -math.inf,
        since_1970_s: float = 0.0,
        kept_gone: int = KEPT,
    ) -> None:
        self.job = job
        self.failed = saved.failed if saved else None
        """LOSS: why the job has ended for all; None: it has not."""
        self._since_1970_s = since_1970_s
        self.looks = 0
        """How often it has looked at what is due. While this is constant, `deadline_s` can only increase."""
        self.owes_look = False
        """Whether messages have come after which `look` is to follow."""
        self._stepped_s = -math.inf
        self.members = Members(kept_gone)
        self.roster = self.members.roster
        self._only_holders = OnlyHolders(self.members)
        self._ending = Ending(self.members)
        self._contenders = Contenders(self.roster, lambda: [r.at for r in self.members.rounds])
        self._phases = Phases(self.members, self._contenders, saved, lost=lost, life=life, reachable_s=reachable_s)
        self._hellos = Hellos(job, self._phases)
        if saved:
            self.members.remember(now, saved)

    @property
    def policy(self) -> FaultPolicy:
        return self._phases.policy

    @property
    def epoch(self) -> int:
        return self._phases.epoch

    @property
    def halted(self) -> bool:
        """Whether another coordinator has the job, so that this one does nothing more."""
        return self._phases.halted

    @property
    def defined(self) -> bool:
        """Whether a first replica has defined the job."""
        return self._phases.lines is not None

    @property
    def startup(self) -> Startup | None:
        """The startup phase; None while the job runs."""
        return self._phases.startup

    @property
    def running(self) -> bool:
        return self.startup is None

    @property
    def remembers(self) -> bool:
        """Whether it knows that the job has had a state, which may be restored, or that the job has ended."""
        return self.startup is None or bool(self.startup.past.chain) or self.members.ended

    @property
    def rounds(self) -> list[Rounds]:
        return self.members.rounds

    @property
    def assignment(self) -> Assignment:
        return self.members.assignment

    # ------------------------------------------------------------ inputs

    def receive(self, now: float, conn: int, message: m.FromReplica, *, look: bool = True) -> Effects:
        """``look`` False: `look` follows soon, as if all messages until then had come at once. Many fragments are due
        together, and a look at all of them for each message would cost as much as all else."""
        if self.halted:
            return [Close(conn)]
        if self.failed is not None:
            return [*([SendTo(conn, self.failed)] if isinstance(message, m.Hello) else []), Close(conn)]
        if isinstance(message, m.Hello):
            return self._hellos.receive(now, conn, message) + self.look(now)
        member = self.roster.by_conn(conn)
        if member is None:
            return []  # not welcomed yet, or superseded: its next hello repeats what matters
        self.roster.hear(member, now)
        hung = member.stalled  # if so, it is awaited again, in other rounds, too
        effects = self._from_member(now, member, message)
        if isinstance(message, m.Heartbeat):
            moves, told = member.progress(now, message), self.members.speeds.heard(now, member)
            effects += told
            if not (moves or told or self._contenders):
                return effects
        if not (effects or hung) and self._changes_nothing(now, member, message):
            return effects
        self.owes_look = True
        return effects + self.look(now) if look else effects

    def _changes_nothing(self, now: float, member: Member, message: m.FromReplica) -> bool:
        """Whether a proposal or a result is one of many that a round still waits for: a round of n replicas must not
        take n looks at n members each."""
        if self._contenders or not self.running:
            return False
        match message:
            case m.Propose(contribution=c) if self._has(c.fragment):
                r = self.rounds[c.fragment]
                return r.attempt is None and r.gather.waits_on(now, member, c)
            case m.Prepared(fragment=f) if self._has(f):
                return self.rounds[f].decide.reduces_on(member)
        return False

    def lost(self, now: float, conn: int) -> Effects:
        self._contenders.drop(conn)
        if self.startup is not None:
            self.startup.lose(now, conn, hung_up=True)
        member = self.roster.by_conn(conn)
        effects: Effects = []
        if member is not None:
            effects, member.hung_up = self.members.away(now, member), True
        return effects + self.look(now)

    def give_up(self, now: float, replica: str) -> Effects:
        """COLD: the replica is not started again, so that a job that has not begun need not wait for it."""
        self._phases.given_up.add(replica)
        return self.look(now)

    def tick(self, now: float) -> Effects:
        if self.halted or self.failed is not None:
            return []
        effects: Effects = []
        for member in self.roster.silent(now, self.policy.dead_after_s):
            effects += self.members.away(now, member, close=True)
        for member, due_s in self._forgettable():
            if now >= due_s:
                usual = now >= member.lost_s + self.policy.evict_after_s
                reason = "away for longer than evict_after_s" if usual else LOST_WITH_IT
                effects += self.members.give_up(member, reason)
        for member, due_s in self._tail():
            if now >= due_s:
                reason = "it holds the rest of the data, and has done nothing with it for evict_after_s"
                self.assignment.gave_up(member.replica)
                effects += self.members.give_up(member, reason)
        return effects + self.look(now)

    def deadline_s(self) -> float:
        """When `tick` must be called at the latest, if nothing happens before."""
        if self.halted or self.failed is not None:
            return math.inf
        due = [self.roster.heard_s() + self.policy.dead_after_s]
        made_due_s = self._stepped_s + 0.01  # what the last step has made due
        due.append(max(self._forgettable_s(), made_due_s))
        due += [max(due_s, made_due_s) for _, due_s in self._tail()]
        if self.running:
            due.append(max(self.members.spares.deadline_s(), made_due_s))
            due.append(self._ending.next_s(self._stepped_s, self.policy))
        if self.startup is not None and not math.isinf(self._stepped_s):
            due.append(self.startup.next_s(self._stepped_s))
        due.append(self._contenders.next_s(self._stepped_s, self.policy))
        due += [r.deadline_s() for r in self.rounds if self.running]
        due.append(self.members.losses.next_s(self._stepped_s, self._missed()))
        return min(due, default=math.inf)

    # ------------------------------------------------------------ messages of members, and silent members

    def _from_member(self, now: float, member: Member, message: m.FromReplica) -> Effects:
        match message:
            case m.Propose(contribution=c) if self._has(c.fragment):
                member.wants = message.wants
                return self.rounds[c.fragment].gather.propose(member, c, now=message.now)
            case m.Heartbeat(readings=readings):
                known = [x for x in readings if self._has(x.fragment)]
                return [effect for x in known for effect in self.rounds[x.fragment].gather.read(now, member, x)]
            case m.Prepared(fragment=f) if self._has(f):
                self.rounds[f].decide.prepare(now, member, message)
            case m.Failed(fragment=f) if self._has(f):
                return self.rounds[f].decide.fail(now, member, message)
            case m.Holds(position=p) if self._has(p.fragment):
                if self.members.off_branch(p):
                    return self.members.fork(member, (p,))
                member.moved_s = now
                self.rounds[p.fragment].fetched(now, member, p)
                self.assignment.arrived(member)
            case m.Lacks(fragment=f) if self._has(f):
                self.rounds[f].lacks(now, member)
            case m.Ask(units=units):
                self.assignment.ask(member, units)
            case m.Copied(versions=versions) if len(versions) == len(self.rounds):
                return self.members.backups.copied(member, message)
            case m.Keeps():
                return self.members.backups.keeps(member, message)
            case m.KeepFailed():
                return self.members.backups.failed(member, message)
            case m.Finished():
                return self._finished(member)
            case m.StopJob():
                return self._ending.stop(member, message)
            case m.AtEnd():
                member.leaving = True
                self._ending.reached(now, member, message, self.policy)
                return self._finished(member)
            case m.Leaving():
                member.leaving = True
            case m.Bye(early=early, reason=reason):
                self.members.bye(member, early=early, reason=reason)
        return []

    @staticmethod
    def _finished(member: Member) -> Effects:
        told, member.finished = member.finished, True
        return [] if told else [Finished(*member.incarnation_id)]

    def _has(self, fragment: int) -> bool:
        return 0 <= fragment < len(self.rounds)

    def _forgettable(self) -> list[tuple[Member, float]]:
        """Members that are away, and when each is evicted; none while no replica is here to go on without them."""
        if self._phases.alone():
            return []
        absent = self._phases.absent()
        early = self._only_holders.given_up_s(self.policy) if absent and self.running else {}
        return [(x, early.get(x.incarnation_id, x.lost_s + self.policy.evict_after_s)) for x in absent]

    def _missed(self) -> Sequence[Member]:
        """LOSS: members that are away, while others are here."""
        if not self.members.losses.matter or self._phases.alone():
            return []
        return self._phases.absent()

    def _forgettable_s(self) -> float:
        """When the first of `_forgettable` is evicted; inf: none is."""
        if self._phases.alone():
            return math.inf
        if self.startup is not None:
            return self.startup.absent_s() + self.policy.evict_after_s
        lost_s = self.roster.lost_s()
        early = self._only_holders.given_up_s(self.policy) if lost_s < math.inf else {}
        return min(lost_s + self.policy.evict_after_s, *early.values(), math.inf)

    def _tail(self) -> list[tuple[Member, float]]:
        return self.members.tail() if self.running else []

    # ------------------------------------------------------------ what is due

    def look(self, now: float) -> Effects:
        """Does everything that has become due or decidable."""
        self.owes_look = False
        effects = self._go_on(now)
        lost = None if self.failed is not None else self.members.losses.first(now, self._missed())
        return effects if lost is None else effects + self._fail(now, lost)

    def _fail(self, now: float, lost: Lost) -> Effects:
        """LOSS: ends the job for all replicas, those here and those that come later."""
        saved = [self.startup.truth.saved(r.fragment) if self.startup is not None else [] for r in self.rounds]
        last = [(known or [r.versions.last])[-1] for r, known in zip(self.rounds, saved, strict=True)]
        versions, inner_step = tuple(max(0, d.version) for d in last), last[0].inner_step
        at_s = self._since_1970_s + now
        self.failed = m.JobFailed(*lost.incarnation_id, lost.why, lost.inner_step, versions, inner_step, at_s)
        data = {"reason": lost.why, "lost_step": lost.inner_step, "versions": list(versions)}
        effects: Effects = [self.failed, Emit("job_failed", *lost.incarnation_id, inner_step=inner_step, data=data)]
        conns = [x.conn for x in self.roster.connected() if x.conn is not None]
        if self.startup is not None:
            conns += [*self.startup.hellos, *self.startup.rivals]
        for conn in conns:
            effects += [SendTo(conn, self.failed), Close(conn)]
        for member in self.roster.connected():
            self.roster.detach(member, now)
        return [*effects, *self._contenders.close()]  # they hear of it when they come again

    def _go_on(self, now: float) -> Effects:
        if self.halted or self.failed is not None:
            return []
        self._stepped_s = now
        self.looks += 1
        effects = self.members.remove_leavers(now)
        effects += self._hellos.settle(now)
        effects += self._phases.start_up(now)
        if not self.running:
            self._ending.forget()
            return effects
        effects += self.members.promote_spares(now)
        if self._phases.unheld():
            return effects + self._phases.roll_back(now)
        for r in self.rounds:
            effects += r.step(now)
        effects += self.assignment.step(now)
        effects += self.members.forget_gone(self.epoch)
        effects += self._ending.tell_stop()
        effects += self._ending.step(now, self.policy)
        return effects + self._only_holders.tell(now, self.policy)
