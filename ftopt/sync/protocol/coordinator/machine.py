"""The coordinator side of the outer-sync protocol: a pure state machine for one job.

Two phases. While it gathers (`Gathering`: after a start, a restart or a rollback) it keeps hellos and decides nothing.
While it runs, each fragment's `Rounds` do the work. Here are the inputs, how a hello is answered, and the passage from
one phase to the other; what becomes of members is in `Members`.

Connections are numbers that the shell gives. Time is seconds on any steady clock. A coordinator of a new life gets what
its journal saved, or nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.admission import misfit, settings_of
from ftopt.sync.protocol.coordinator.attempts import Numbers
from ftopt.sync.protocol.coordinator.effects import (
    Close,
    Decided,
    Effect,
    Epoch,
    Halt,
    Rollback,
    Saved,
    Send,
    Tell,
)
from ftopt.sync.protocol.coordinator.grants import Lending
from ftopt.sync.protocol.coordinator.members import Members
from ftopt.sync.protocol.coordinator.roster import Member
from ftopt.sync.protocol.coordinator.rounds import Rounds
from ftopt.sync.protocol.coordinator.startup import Gathering
from ftopt.sync.protocol.coordinator.status import status
from ftopt.sync.protocol.settings import Sync

_LOST = "nobody holds the state of this job any more, and there is no checkpoint of it at hand: it starts anew"


class Coordinator:
    """The machine. Every input returns the effects that it causes, in the order in which they must happen.

    Args:
        job: the job's name.
        saved: what the journal of earlier lives holds, None without one.
        now: the clock.
        life: a number above that of any earlier life, also of one whose journal is lost: seconds since 1970 will do. It
            keeps epochs, and with them chains and attempt numbers, from being used twice.
    """

    def __init__(self, job: str, *, saved: Saved | None = None, now: float = 0.0, life: int = 1) -> None:
        self.job = job
        self.epoch = max(saved.epoch + 1 if saved else 1, life)
        self.sync = Sync()
        self.lines: dict[str, str] | None = None
        self.halted = False
        self.looks = 0
        """How often it has looked at what is due. While this stands still, `deadline_s` can only move on."""
        self.members = Members()
        self.roster = self.members.roster
        self.gathering: Gathering | None = Gathering(self.roster, saved)
        self._numbers = Numbers(self.epoch, max((d.attempt for d in saved.decided), default=0) if saved else 0)
        self._contenders: dict[int, tuple[m.Hello, float]] = {}
        self._journalled_epoch = False
        if saved:
            for mark in saved.gone:
                self.roster.forget(mark)
            for mark in saved.roster:
                if not self.roster.is_gone(mark):
                    self.roster.know(mark, now)

    @property
    def running(self) -> bool:
        return self.gathering is None

    @property
    def rounds(self) -> list[Rounds]:
        return self.members.rounds

    @property
    def lending(self) -> Lending | None:
        """The sample ledger; None in a job without one."""
        return self.members.lending

    # ------------------------------------------------------------ inputs

    def receive(self, now: float, conn: int, message: m.FromReplica) -> list[Effect]:
        """A message arrived on ``conn``."""
        if self.halted:
            return [Close(conn)]
        if isinstance(message, m.Hello):
            return self._hello(now, conn, message) + self._step(now)
        member = self.roster.by_conn(conn)
        if member is None:
            return []  # not welcomed yet, or superseded: what it says now it says again in its next hello
        member.heard_s = now
        effects = self._from_member(now, member, message)
        if isinstance(message, m.Progress) and not member.progress(now, message) and not self._contenders:
            return effects
        if not effects and self._changes_nothing(now, member, message):
            return effects
        return effects + self._step(now)

    def _changes_nothing(self, now: float, member: Member, message: m.FromReplica) -> bool:
        """Whether a proposal, or a report of a result, is one of many, and the others are still waited for: a round of
        n replicas must not take n looks at each of n."""
        if self._contenders or not self.running:
            return False
        match message:
            case m.Propose(contribution=c) if self._has(c.fragment):
                return self.rounds[c.fragment].waits_on(now, member, c)
            case m.Prepared(fragment=f) if self._has(f):
                return self.rounds[f].reduces_on(member)
        return False

    def lost(self, now: float, conn: int) -> list[Effect]:
        """The connection ended."""
        self._contenders.pop(conn, None)
        if self.gathering is not None:
            self.gathering.lose(conn)
        member = self.roster.by_conn(conn)
        effects = self.members.away(now, member) if member is not None else []
        return effects + self._step(now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self.halted:
            return []
        effects: list[Effect] = []
        for member in self.roster.connected():
            if now >= member.heard_s + self.sync.dead_after_s:
                effects += self.members.away(now, member, close=True)
        for member in self._forgettable():
            if now >= member.lost_s + self.sync.forget_s:
                effects += self.members.gone(member.mark, "away for longer than forget_s")
        for member in self._lessees():
            if now >= self._tail_s(member):
                reason = "it holds the rest of the data, and has done nothing with it for tail_s (forget_s)"
                assert self.lending is not None
                self.lending.idle.add(member.replica)
                effects += self.members.gone(member.mark, reason)
        return effects + self._step(now)

    def deadline_s(self) -> float:
        """When `tick` is to be called at the latest, if nothing happens before."""
        if self.halted:
            return math.inf
        due = [x.heard_s + self.sync.dead_after_s for x in self.roster.connected()]
        made_due_s = self._stepped_s + 0.01  # by a step
        due += [max(x.lost_s + self.sync.forget_s, made_due_s) for x in self._forgettable()]
        due += [max(self._tail_s(x), made_due_s) for x in self._lessees()]
        if self.gathering is not None and not math.isinf(self._stepped_s):
            end_s = self.gathering.deadline_s()
            due += [end_s] if end_s > self._stepped_s else []
        due += [r.deadline_s() for r in self.rounds if self.running]
        return min(due, default=math.inf)

    _stepped_s = -math.inf

    def status(self, now: float) -> dict[str, Any]:
        """What `ftopt status` shows."""
        return status(self, now)

    # ------------------------------------------------------------ hellos

    def _hello(self, now: float, conn: int, hello: m.Hello) -> list[Effect]:
        if refusal := misfit(self.job, self.lines, hello, self.members.samples):
            return self._refuse(conn, hello, "final", refusal)
        if self.lines is None:
            self._define(hello)
        if self._alone():  # being away counts from when somebody is there to miss them
            for member in self.roster.away():
                member.lost_s = now
        effects: list[Effect] = []
        if hello.epoch >= self.epoch and self.gathering is not None:
            effects += self._new_epoch(hello.epoch + 1)
        elif hello.epoch > self.epoch:
            self.halted = True
            reason = f"replica {hello.replica} knows epoch {hello.epoch}, this coordinator is of epoch {self.epoch}"
            return [Tell("halt", data={"reason": reason}), Halt(reason)]
        elif not self._journalled_epoch:
            effects += self._new_epoch(self.epoch)
        for mark in hello.gone:
            if not self.roster.is_gone(mark):
                effects += self._learn_gone(now, hello, mark)
        for mark in hello.roster:
            effects += self.members.know(now, mark)
        return effects + self._identify(now, conn, hello)

    def _learn_gone(self, now: float, hello: m.Hello, mark: m.Mark) -> list[Effect]:
        """FENCE. Who restores a checkpoint and was given a life that this knows comes back as the next one after it."""
        replica, incarnation = mark
        member = self.roster.members.get(replica)
        reads = self.gathering is not None and replica in self.gathering.sent
        waited = reads and member is not None and member.incarnation <= incarnation
        heir, lives = dict(hello.heirs).get(replica, ""), dict(hello.roster)
        adopts = (heir, lives[heir]) if heir in lives and not self.roster.is_gone((heir, lives[heir])) else None
        effects = self.members.gone(mark, f"reported by {hello.replica}", heir=adopts)
        return [*effects, *self._await_restored(now, (replica, incarnation + 1))] if waited else effects

    def _await_restored(self, now: float, mark: m.Mark) -> list[Effect]:
        """It reads a checkpoint, and may hold a version when it comes back."""
        effects = self.members.know(now, mark)
        self.roster.members[mark[0]].in_doubt = True
        return effects

    def _define(self, hello: m.Hello) -> None:
        """The first replica of a job defines it."""
        self.lines, self.sync = dict(hello.lines), settings_of(hello)
        assert self.gathering is not None
        self.gathering.sync = self.sync
        self.members.define(hello.fragments, self.sync, self._numbers, hello.samples)

    def _identify(self, now: float, conn: int, hello: m.Hello) -> list[Effect]:
        """Which incarnation says hello: one that is gone, a known one, or a newcomer."""
        if not hello.incarnation:
            rival = self.roster.members.get(hello.replica)
            if rival is None or rival.conn is None:
                return self._newcomer(now, conn, hello)
            self._contenders[conn] = (hello, now)
            return [Send(conn, m.Hold(f"another process is connected as {hello.replica}"))]
        mark = (hello.replica, hello.incarnation)
        effects = self.members.know(now, mark)
        member = self.roster.members.get(hello.replica)
        if member is None or member.mark != mark:
            reason = "this incarnation was given up, or superseded"
            return [*effects, *self._refuse(conn, hello, "gone", reason)]
        if member.conn is not None and member.conn != conn:
            effects += self.members.away(now, member, close=True)
        if self.gathering is not None:
            return effects + self.gathering.hear(now, conn, hello)
        return effects + self._admit(now, conn, hello)

    def _newcomer(self, now: float, conn: int, hello: m.Hello) -> list[Effect]:
        """A new incarnation; whatever was known under its id is superseded."""
        effects: list[Effect] = []
        old = self.roster.members.get(hello.replica)
        heritage = self.members.heritage(old) if old is not None and self.running else None
        if old is not None:
            effects += self.members.gone(old.mark, "superseded by a newcomer")
        if self.gathering is not None:
            return effects + self.gathering.hear(now, conn, hello)
        effects += self.members.know(now, (hello.replica, self.roster.next_incarnation(hello.replica)))
        if heritage is None:
            return effects + self._admit(now, conn, hello)
        self.roster.members[hello.replica].heir = True
        effects += self._admit(now, conn, replace(hello, claim=heritage.ranges))
        return [*effects, Send(conn, heritage)]

    def _contend(self, now: float) -> list[Effect]:
        """Two processes with one id: the newcomer supersedes one that is lost or silent, never a living one."""
        effects: list[Effect] = []
        for conn, (hello, since_s) in list(self._contenders.items()):
            rival = self.roster.members.get(hello.replica)
            if rival is None or rival.conn is None:
                del self._contenders[conn]
                effects += self._newcomer(now, conn, hello)
            elif rival.heard_s >= since_s + self.sync.dead_after_s:
                del self._contenders[conn]
                reason = (
                    f"a living replica is connected as {hello.replica!r}; replica ids must be unique in a job: "
                    "give this one another id, or end the other process"
                )
                effects += self._refuse(conn, hello, "final", reason)
        return effects

    def _refuse(self, conn: int, hello: m.Hello, kind: str, reason: str) -> list[Effect]:
        return [
            Tell("refuse", hello.replica, hello.incarnation, data={"kind": kind, "reason": reason}),
            Send(conn, m.Refused(kind, reason)),
            Close(conn),
        ]

    # ------------------------------------------------------------ coming in

    def _admit(self, now: float, conn: int, hello: m.Hello, *, founder: bool = False) -> list[Effect]:
        """Welcomes a replica into the running job and tells it what it lacks."""
        member = self.roster.members[hello.replica]
        self.roster.attach(member, conn, now)
        if not founder and any(self.rounds[p.fragment].off_branch(p) for p in hello.positions):
            return self._fork(member, hello.positions)
        member.address, member.leaving, member.stalled_at = hello.address, False, None
        member.inner_step, member.state = hello.inner_step, "training" if hello.positions else "fetching"
        if member.counted is None:
            member.counted = {r.fragment: r.at.version for r in self.rounds} if hello.incarnation else {}
        member.held, member.hopes, member.said_bye = {p.fragment: p for p in hello.positions}, {}, False
        top = self.rounds[0]
        name = "return" if hello.incarnation else "join"
        marks, gone = self.roster.marks(), self.roster.gone_marks()
        effects: list[Effect] = [
            Send(conn, m.Welcome(self.epoch, member.incarnation, marks, gone)),
            Tell(name, *member.mark, inner_step=top.inner_step, version=top.at.version),
        ]
        for r in self.rounds:
            effects += self._place(member, r, hello, founder=founder)
        if self.lending is not None:
            effects += self.lending.admit(member, hello)
        return effects

    def _place(self, member: Member, r: Rounds, hello: m.Hello, *, founder: bool) -> list[Effect]:
        """Brings one fragment of a welcomed replica up to date, or has it told how to get there."""
        conn, f = member.conn, r.fragment
        assert conn is not None
        found = [r.find(member.replica, mark) for mark in hello.prepared if mark.fragment == f]
        if any(found) and r.last is not None:
            member.held[f] = r.at
            return [Send(conn, m.Commit(f, r.at.version, r.last.attempt, r.last.digest, r.last.chain))]
        fresh = hello.initial != "" and r.last is not None and r.last.version == 0
        if founder or (fresh and r.last is not None and r.last.digest == hello.initial):
            member.held[f] = r.at
            member.newcomer.add(f)
            return [Send(conn, m.Start(r.at, r.inner_step, r.last.done if r.last is not None else ()))]
        if not r.holds(member):
            r.catch_up.add(member.replica)
            return []
        offers = [c for c in hello.contributions if c.fragment == f]
        if hello.incarnation and not offers:
            member.newcomer.add(f)
        return [effect for c in offers for effect in r.propose(member, c)]

    def _fork(self, member: Member, positions: tuple[m.Position, ...]) -> list[Effect]:
        """CHAIN: a replica holds what is not on this job's history; its work can't be merged."""
        at = next(p for p in positions if self.rounds[p.fragment].off_branch(p))
        tell = Tell("fork", *member.mark, at.fragment, at.version, data={"chain": at.chain})
        return [tell, *self.members.gone(member.mark, "its state is on another branch of the history")]

    # ------------------------------------------------------------ members

    def _from_member(self, now: float, member: Member, message: m.FromReplica) -> list[Effect]:
        match message:
            case m.Propose(contribution=c) if self._has(c.fragment):
                member.wants = message.wants
                return self.rounds[c.fragment].propose(member, c, now=message.now)
            case m.Progress(readings=readings):
                known = [x for x in readings if self._has(x.fragment)]
                return [effect for x in known for effect in self.rounds[x.fragment].read(now, member, x)]
            case m.Prepared(fragment=f) if self._has(f):
                self.rounds[f].prepare(now, member, message)
            case m.Failed(fragment=f) if self._has(f):
                return self.rounds[f].fail(now, member, message)
            case m.Holds(position=p) if self._has(p.fragment):
                if self.rounds[p.fragment].off_branch(p):
                    return self._fork(member, (p,))
                self.rounds[p.fragment].fetched(now, member, p)
                if self.lending is not None and not p.fragment:
                    self.lending.arrived(member)
            case m.Lacks(fragment=f) if self._has(f):
                self.rounds[f].lacks(now, member)
            case m.Ask(units=units) if self.lending is not None:
                self.lending.ask(member, units)
            case m.Copied():
                return self.members.neighbours.copied(member, message)
            case m.Keeps():
                return self.members.neighbours.keeps(member, message)
            case m.Leaving():
                member.leaving = True
            case m.Bye():
                member.leaving = member.said_bye = True
                for r in self.rounds:
                    r.withdraw(member.replica)
        return []

    def _see_off(self, now: float) -> list[Effect]:
        """Lets go who has said goodbye: at once, unless it is the only holder of what somebody else may still fetch."""
        effects: list[Effect] = []
        for member in [x for x in self.roster.connected() if x.said_bye]:
            others = [x for x in self.roster.connected() if not x.said_bye]
            if not others or all(any(r.holds(x) for x in others) for r in self.rounds if r.holds(member)):
                effects += self.members.leave(now, member)
        return effects

    def _has(self, fragment: int) -> bool:
        return 0 <= fragment < len(self.rounds)

    def _alone(self) -> bool:
        here = self.gathering.hellos if self.gathering is not None else self.roster.connected()
        return not here

    def _forgettable(self) -> list[Member]:
        """Members that are away, as long as somebody is there to go on without them."""
        if self._alone():
            return []
        away = self.roster.away()
        return away if self.gathering is None else [x for x in away if not self.gathering.heard(x.mark)]

    def _lessees(self) -> list[Member]:
        """Members that may hold units."""
        return list(self.roster.members.values()) if self.lending is not None and self.running else []

    def _tail_s(self, member: Member) -> float:
        """When it is given up, since the rest of the data waits for it; inf: it does not."""
        assert self.lending is not None
        patience_s = self.sync.forget_s if self.sync.tail_s is None else self.sync.tail_s
        quiet_since_s = max(self.lending.waits_since_s(member.mark), member.moved_s)
        top = self.rounds[0]
        if member.replica in top.proposals and member.busy_since_s is None:  # its peers keep it waiting
            if top.attempt is None:
                return math.inf
            quiet_since_s = max(quiet_since_s, top.attempt.started_s + self.sync.forget_s)
        return quiet_since_s + patience_s + member.patience_s()

    # ------------------------------------------------------------ phases

    def _step(self, now: float) -> list[Effect]:
        """What has become due: contenders, the end of gathering, a rollback, rounds."""
        if self.halted:
            return []
        self._stepped_s = now
        self.looks += 1
        effects = self._contend(now) + self._see_off(now)
        if self.gathering is not None:
            for conn, hello in self.gathering.outlived():
                effects += self._refuse(conn, hello, "gone", "this incarnation was given up meanwhile")
            if self.gathering.may_end(now):
                restored = self._restore_checkpoints(now, self.gathering)
                effects += restored or self._open(now, self.gathering)
        if self.gathering is None:
            if not all(self._survives(r) for r in self.rounds):
                return effects + self._rollback(now)
            for r in self.rounds:
                effects += r.step(now)
            if self.lending is not None:
                effects += self.lending.step(now)
        return effects

    def _open(self, now: float, gathering: Gathering) -> list[Effect]:
        """Gathering ends: finds the truth among the journal and the hellos, then welcomes everybody."""
        self.gathering = None
        veterans, founder = gathering.veterans(), gathering.founder()
        effects: list[Effect] = []
        for r in self.rounds:
            effects += self._restore(r, gathering) if veterans else self._cold(r, gathering.hellos[founder])
        top = self.rounds[0]
        name = "recover" if veterans else "start"
        data: dict[str, object] = {"epoch": self.epoch, "versions": [r.at.version for r in self.rounds]}
        done = top.last.done if top.last is not None else gathering.done(top.at)
        if self.lending is not None:
            unheard = [x.mark for x in self.roster.away() if not gathering.heard(x.mark)]
            effects += self.lending.open(done, gathering.cursor(), unheard)
        if self.members.sharing is not None:
            self.members.sharing.open(top.at.version + 1, done, gathering.shares(top.at))
        if self.members.samples is not None:
            data |= {"done": done, "samples": asdict(self.members.samples)}
        if gathering.lost and not veterans:
            effects += [Send(conn, m.Hold(_LOST)) for conn in sorted(gathering.hellos)]
        effects.append(Tell(name, version=top.at.version, inner_step=top.inner_step, data=data))
        newcomers = sorted(hello.replica for hello in gathering.hellos.values() if hello.incarnation == 0)
        for replica in newcomers:  # before the first is let in, who would be told of each of the others
            effects += self.members.know(now, (replica, self.roster.next_incarnation(replica)))
        for conn, hello in sorted(gathering.hellos.items(), key=lambda x: (x[0] != founder, x[1].replica)):
            effects += self._admit(now, conn, hello, founder=not veterans and conn == founder)
        for r in self.rounds:  # at the start of a job nobody is a latecomer
            for member in self.roster.connected():
                if r.holds(member):
                    member.newcomer.discard(r.fragment)
        return effects

    def _restore_checkpoints(self, now: float, gathering: Gathering) -> list[Effect]:
        """RESTORE: who has the newest checkpoint is sent for it. It comes back with that, and is waited for."""
        effects: list[Effect] = []
        told: list[tuple[int, m.Mark, m.Position]] = []
        for conn, hello, at in gathering.restorers():
            gathering.lose(conn)
            mark = (hello.replica, hello.incarnation or self.roster.next_incarnation(hello.replica))
            effects += self._await_restored(now, mark)
            gathering.sent.add(hello.replica)
            told.append((conn, mark, at))
        roster = tuple(mark for _, mark, _ in told)
        for conn, mark, at in told:
            effects += [Tell("restore", *mark, version=at.version), Send(conn, m.Restore(mark[1], roster))]
        return effects

    def _restore(self, r: Rounds, gathering: Gathering) -> list[Effect]:
        """The truth of one fragment; journalled if the journal does not know it."""
        at, inner_step = gathering.truth(r.fragment)
        saved = gathering.saved(r.fragment)
        r.history |= {d.version: d.chain for d in saved}
        last = saved[-1] if saved and saved[-1].chain == at.chain else None
        r.restore(at, inner_step, last=last)
        if last is not None:
            return []
        done = () if r.fragment else gathering.done(at)
        found = Decided(r.fragment, at.version, 0, "", at.chain, inner_step, (), done)
        return [Rollback(r.fragment, at.version - 1), found]

    def _cold(self, r: Rounds, founder: m.Hello) -> list[Effect]:
        """COLD: version 0 is the state of one member, journalled like any decision."""
        chain = m.first_chain(r.fragment, self.epoch, founder.replica, founder.initial)
        done = () if r.fragment else founder.done
        start = Decided(r.fragment, 0, 0, founder.initial, chain, founder.inner_step, (), done)
        r.history.clear()
        r.restore(m.Position(r.fragment, 0, chain), founder.inner_step, last=start)
        return [Rollback(r.fragment, -1), start]

    def _survives(self, r: Rounds) -> bool:
        """Whether a member holds the current version, or may hold it."""
        return any(x.may_hold(r.at) for x in self.roster.members.values())

    def _rollback(self, now: float) -> list[Effect]:
        """ROLLBACK: every holder of the highest version is gone. The job gathers anew, with what it knows of others."""
        effects: list[Effect] = [
            Tell("rollback", fragment=r.fragment, version=r.at.version, inner_step=r.inner_step)
            for r in self.rounds
            if not self._survives(r)
        ]
        for member in self.roster.connected():
            effects += self.members.away(now, member, close=True)
        effects += [Close(conn) for conn in self._contenders]
        self._contenders.clear()
        self.gathering = Gathering(self.roster, lost=self.rounds[0].at.chain)
        self.gathering.sync = self.sync
        if not self.roster.members:
            self.lines = None  # everybody has left: the next one defines the job
        return [*effects, *self._new_epoch(self.epoch + 1)]

    def _new_epoch(self, epoch: int) -> list[Effect]:
        self.epoch, self._journalled_epoch = epoch, True
        self._numbers.restart(epoch)
        return [Epoch(epoch)]
