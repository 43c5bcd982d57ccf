"""The coordinator side of the outer-sync protocol: a pure state machine for one job.

Two phases. *Gathering*: after a start, a restart or a rollback it listens to hellos and decides nothing, until it knows
what the truth is (WAIT: everybody on the roster was heard or is gone; COLD: nobody reports any version and all
``start_replicas`` are there). *Running*: each fragment's `Rounds` do the work; here are the hellos, the lost
connections, and what is gone.

Connections are numbers that the shell gives. Time is seconds on any steady clock. A coordinator of a new life gets what
its journal saved, or nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import fields
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.effects import (
    Close,
    Decided,
    Effect,
    Epoch,
    Gone,
    Halt,
    Known,
    Rollback,
    Saved,
    Send,
    Tell,
)
from ftopt.sync.protocol.roster import Member, Roster
from ftopt.sync.protocol.rounds import Numbers, Rounds
from ftopt.sync.protocol.settings import Sync


class Coordinator:
    """The machine. Every input returns the effects that it causes, in the order in which they must happen."""

    def __init__(self, job: str, *, saved: Saved | None = None) -> None:
        self.job = job
        self.epoch = (saved.epoch if saved else 0) + 1
        self.roster = Roster()
        self.sync = Sync()
        self.lines: dict[str, str] | None = None
        self.rounds: list[Rounds] = []
        self.running = False
        self.halted = False
        self._numbers = Numbers(self.epoch)
        self._hellos: dict[int, m.Hello] = {}
        self._contenders: dict[int, tuple[m.Hello, float]] = {}
        self._heard: set[m.Mark] = set()
        self._first_s: float | None = None
        self._journalled_epoch = False
        self._saved = saved
        if saved:
            for mark in saved.gone:
                self.roster.forget(mark)
            for replica, incarnation in saved.roster:
                self.roster.know(replica, incarnation)

    # ------------------------------------------------------------ inputs

    def receive(self, now: float, conn: int, message: m.FromReplica) -> list[Effect]:
        """A message arrived on ``conn``."""
        if self.halted:
            return [Close(conn)]
        if isinstance(message, m.Hello):
            effects = self._hello(now, conn, message)
            return effects + self._step(now)
        member = self.roster.by_conn(conn)
        if member is None:
            return []  # not welcomed yet, or superseded: what it says now it says again in its next hello
        member.heard_s = now
        return self._from_member(now, member, message) + self._step(now)

    def lost(self, now: float, conn: int) -> list[Effect]:
        """The connection ended."""
        self._contenders.pop(conn, None)
        if hello := self._hellos.pop(conn, None):
            self._heard.discard((hello.replica, hello.incarnation))
        member = self.roster.by_conn(conn)
        if member is None:
            return self._step(now)
        return self._away(now, member) + self._step(now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self.halted:
            return []
        effects: list[Effect] = []
        for member in self.roster.connected():
            if now - member.heard_s > self.sync.dead_after_s and member.conn is not None:
                effects += [Close(member.conn), *self._away(now, member)]
        for member in list(self.roster.members.values()):
            if member.conn is None and now - member.lost_s > self.sync.forget_s:
                effects += self._gone(member.mark, "away for longer than forget_s")
        for conn, (hello, since) in list(self._contenders.items()):
            effects += self._contend(now, conn, hello, since)
        return effects + self._step(now)

    def deadline_s(self) -> float:
        """When `tick` is to be called at the latest, if nothing happens before."""
        due = [x.heard_s + self.sync.dead_after_s for x in self.roster.connected()]
        due += [x.lost_s + self.sync.forget_s for x in self.roster.members.values() if x.conn is None]
        due += [since + self.sync.dead_after_s for _, since in self._contenders.values()]
        if not self.running and self._first_s is not None:
            due.append(self._open_by_s())
        due += [r.deadline_s() for r in self.rounds]
        return min(due, default=math.inf)

    def status(self, now: float) -> dict[str, Any]:
        """What `ftopt status` shows."""
        return {
            "job": self.job,
            "epoch": self.epoch,
            "phase": "running" if self.running else self._waiting_for(now),
            "fragments": [
                {
                    "version": r.at.version,
                    "chain": r.at.chain,
                    "inner_step": r.inner_step,
                    "proposed": sorted(r.proposals),
                    "attempt": r.attempt.attempt if r.attempt else None,
                    "attempts": r.attempts,
                    "attempts_aborted": r.aborted,
                }
                for r in self.rounds
            ],
            "replicas": [
                {
                    "replica": x.replica,
                    "incarnation": x.incarnation,
                    "state": x.state if x.conn is not None else "away",
                    "stalled": x.stalled,
                    "inner_step": x.inner_step,
                    "step_s": x.step_s,
                    "versions": [x.held[f].version if f in x.held else None for f in range(len(self.rounds))],
                }
                for _, x in sorted(self.roster.members.items())
            ],
        }

    # ------------------------------------------------------------ hellos

    def _hello(self, now: float, conn: int, hello: m.Hello) -> list[Effect]:
        if refusal := self._misfit(hello):
            return self._refuse(conn, hello, "final", refusal)
        if self.lines is None:
            self.lines = dict(hello.lines)
            self.sync = _sync(hello.settings)
            self.rounds = [Rounds(f, self.roster, self.sync, self._numbers) for f in range(hello.fragments)]
            for r in self.rounds:
                r.undropped = dict(self.roster.gone)
        effects: list[Effect] = []
        if hello.epoch > self.epoch or (hello.epoch == self.epoch and not self.running):
            if self.running:
                self.halted = True
                reason = f"replica {hello.replica} knows epoch {hello.epoch}, this coordinator is of epoch {self.epoch}"
                return [Tell("halt", data={"reason": reason}), Halt(reason)]
            effects += self._new_epoch(hello.epoch + 1)
        if not self._journalled_epoch:
            effects += self._new_epoch(self.epoch)
        for mark in hello.gone:
            if not self.roster.is_gone(mark):
                effects += self._gone(mark, f"reported by {hello.replica}")
        for replica, incarnation in hello.roster:
            effects += self._know(now, replica, incarnation)
        if hello.incarnation:
            if self.roster.is_gone((hello.replica, hello.incarnation)):
                return [*effects, *self._refuse(conn, hello, "gone", "this incarnation was given up")]
            effects += self._know(now, hello.replica, hello.incarnation)
            member = self.roster.members[hello.replica]
            if member.incarnation != hello.incarnation:
                return [*effects, *self._refuse(conn, hello, "gone", "this incarnation was superseded")]
        else:
            rival = self.roster.members.get(hello.replica)
            if rival is not None and rival.conn is not None:
                self._contenders[conn] = (hello, now)
                return [*effects, Send(conn, m.Hold(f"another process is connected as {hello.replica}"))]
        if self._first_s is None:
            self._first_s = now
        return effects + self._settle(now, conn, hello)

    def _settle(self, now: float, conn: int, hello: m.Hello) -> list[Effect]:
        """Connects the sender of a hello that fits: now, or when the phase of gathering ends."""
        effects: list[Effect] = []
        if hello.incarnation == 0:
            old = self.roster.members.get(hello.replica)
            if old is not None:
                effects += self._gone(old.mark, "superseded by a newcomer")
            if not self.running:
                return effects + self._gather(now, conn, hello)
            incarnation = self.roster.next_incarnation(hello.replica)
            effects += self._know(now, hello.replica, incarnation)
            return effects + self._admit(now, conn, hello)
        member = self.roster.members[hello.replica]
        if member.conn is not None and member.conn != conn:
            effects += [Close(member.conn), *self._away(now, member)]
        if self.running:
            return effects + self._admit(now, conn, hello)
        self._heard.add(member.mark)
        return effects + self._gather(now, conn, hello)

    def _gather(self, now: float, conn: int, hello: m.Hello) -> list[Effect]:
        """Keeps a hello until gathering ends; the newest of a replica counts."""
        effects: list[Effect] = []
        for known, other in list(self._hellos.items()):
            if other.replica == hello.replica:
                del self._hellos[known]
                effects.append(Close(known))
        self._hellos[conn] = hello
        text = self._waiting_for(now)
        return [*effects, *(Send(c, m.Hold(text)) for c in self._hellos)]

    def _admit(self, now: float, conn: int, hello: m.Hello) -> list[Effect]:
        """Welcomes a replica into the running job and tells it what it lacks."""
        member = self.roster.members[hello.replica]
        if forked := self._forked(hello):
            effects = [
                Tell("fork", hello.replica, hello.incarnation, forked.fragment, forked.version),
                *self._gone(member.mark, "it is on another branch of the history"),
            ]
            return [
                *effects,
                *self._refuse(conn, hello, "gone", "its state is on another branch of the history"),
            ]
        member.conn, member.heard_s, member.address = conn, now, hello.address
        member.leaving, member.stalled_at, member.initial = False, None, hello.initial
        member.inner_step, member.state = hello.inner_step, "training" if hello.positions else "fetching"
        member.told, member.held = {}, {p.fragment: p for p in hello.positions}
        effects = [
            Send(
                conn, m.Welcome(self.epoch, member.incarnation, self.roster.marks(), self.roster.gone_marks())
            ),
            Tell(
                "return" if hello.incarnation else "join",
                member.replica,
                member.incarnation,
                inner_step=self.rounds[0].inner_step,
                version=self.rounds[0].at.version,
            ),
        ]
        for r in self.rounds:
            effects += self._place(member, r, hello)
        return effects

    def _place(self, member: Member, r: Rounds, hello: m.Hello) -> list[Effect]:
        """Brings one fragment of a welcomed replica up to date, or tells it how to get there."""
        conn = member.conn
        assert conn is not None
        for prepared in hello.prepared:
            if prepared.fragment != r.fragment:
                continue
            r.find(member.replica, prepared)
            d = r.last
            if d and (prepared.attempt, prepared.digest) == (d.attempt, d.digest) and r.at.chain == d.chain:
                member.held[r.fragment] = r.at
                return [Send(conn, m.Commit(r.fragment, d.version, d.attempt, d.digest, d.chain))]
        if (
            r.at.version == 0
            and not hello.positions
            and hello.initial
            and r.at.chain == cold_chain(r.fragment, hello.initial)
        ):
            member.held[r.fragment] = r.at
            member.newcomer.add(r.fragment)
            return [Send(conn, m.Start(r.at))]
        if not r.holds(member):
            return r.behind(member)
        effects: list[Effect] = []
        for contribution in hello.contributions:
            if contribution.fragment == r.fragment:
                effects += r.propose(member, contribution)
        if hello.incarnation and not effects:
            member.newcomer.add(r.fragment)
        return effects

    def _forked(self, hello: m.Hello) -> m.Position | None:
        """CHAIN: a position of the sender that is not on this job's history."""
        for p in hello.positions:
            if p.fragment >= len(self.rounds):
                return p
            r = self.rounds[p.fragment]
            if p.version > r.at.version or r.history.get(p.version, p.chain) != p.chain:
                return p
        return None

    def _misfit(self, hello: m.Hello) -> str:
        """Why a replica can't be part of this job, "" when it can."""
        if hello.protocol != m.PROTOCOL:
            return (
                f"replica {hello.replica} speaks protocol {hello.protocol}, the coordinator {m.PROTOCOL}; "
                "install the same version of ftopt on both"
            )
        if hello.job != self.job:
            return f"this is job {self.job!r}, not {hello.job!r}"
        if self.lines is None:
            try:
                _sync(hello.settings)
            except ValueError as error:
                return str(error)
            return ""
        names = sorted(self.lines.keys() | hello.lines.keys())
        wrong = [
            f"{name}: {hello.lines.get(name, 'nothing')} here, {self.lines.get(name, 'nothing')} in the job"
            for name in names
            if hello.lines.get(name) != self.lines.get(name)
        ]
        if not wrong:
            return ""
        return (
            f"replica {hello.replica} does not fit job {self.job!r}: {'; '.join(wrong)}. The first replica of a job "
            "defines it; start this one with the same settings, or use another job name"
        )

    def _refuse(self, conn: int, hello: m.Hello, kind: str, reason: str) -> list[Effect]:
        return [
            Tell("refuse", hello.replica, hello.incarnation, data={"kind": kind, "reason": reason}),
            Send(conn, m.Refused(kind, reason)),
            Close(conn),
        ]

    def _contend(self, now: float, conn: int, hello: m.Hello, since: float) -> list[Effect]:
        """Two processes with one id: the newcomer supersedes one that is lost or silent, never a living one."""
        rival = self.roster.members.get(hello.replica)
        if rival is None or rival.conn is None:
            del self._contenders[conn]
            return self._settle(now, conn, hello)
        if now - since < self.sync.dead_after_s:
            return []
        del self._contenders[conn]
        reason = (
            f"a living replica is connected as {hello.replica!r}; replica ids must be unique in a job: "
            "give this one another id, or end the other process"
        )
        return self._refuse(conn, hello, "final", reason)

    # ------------------------------------------------------------ members

    def _from_member(self, now: float, member: Member, message: m.FromReplica) -> list[Effect]:
        match message:
            case m.Progress(state=state, inner_step=inner_step, step_s=step_s):
                if member.stalled_at is not None and (inner_step != member.stalled_at or state != "training"):
                    member.stalled_at = None
                member.state, member.inner_step, member.step_s = state, inner_step, step_s
                return []
            case m.Propose(contribution=c) if self._has(c.fragment):
                return self.rounds[c.fragment].propose(member, c)
            case m.Prepared(fragment=f) if self._has(f):
                self.rounds[f].prepare(member, message)
                return []
            case m.Failed(fragment=f) if self._has(f):
                return self.rounds[f].fail(now, member, message)
            case m.Holds(position=p) if self._has(p.fragment):
                member.held[p.fragment] = p
                if self.rounds[p.fragment].holds(member):
                    member.catching_up.discard(p.fragment)
                    return []
                member.catching_up.add(p.fragment)
                return self.rounds[p.fragment].behind(member)
            case m.Lacks(fragment=f) if self._has(f):
                member.held.pop(f, None)
                self.rounds[f].withdraw(member.replica)
                return self.rounds[f].behind(member)
            case m.Leaving():
                member.leaving = True
                return []
            case m.Bye():
                conn = member.conn
                assert conn is not None
                effects = [
                    Tell("leave", member.replica, member.incarnation),
                    *self._gone(member.mark, "left"),
                ]
                return [*effects, Close(conn)]
        return []

    def _has(self, fragment: int) -> bool:
        return 0 <= fragment < len(self.rounds)

    def _away(self, now: float, member: Member) -> list[Effect]:
        """Suspicion: the connection is lost, or silent. The roster keeps it (STICKY)."""
        member.conn, member.lost_s, member.told = None, now, {}
        for r in self.rounds:
            r.lose(member.replica)
        return [Tell("lost", member.replica, member.incarnation)]

    def _know(self, now: float, replica: str, incarnation: int) -> list[Effect]:
        """Puts an incarnation on the roster, journalled, and tells the others."""
        known = self.roster.members.get(replica)
        if self.roster.is_gone((replica, incarnation)) or (known and known.incarnation >= incarnation):
            return []
        effects = self._gone(known.mark, "superseded") if known else []
        member = self.roster.know(replica, incarnation)
        assert member is not None
        member.lost_s = now
        delta = m.Roster(((replica, incarnation),), ())
        return [*effects, Known(replica, incarnation), *self._broadcast(delta)]

    def _gone(self, mark: m.Mark, reason: str) -> list[Effect]:
        """Irrevocable: journalled, told to everybody (FENCE), its COUNT entries dropped with the next commits."""
        member = self.roster.members.get(mark[0])
        self.roster.forget(mark)
        self._heard.discard(mark)
        for r in self.rounds:
            r.undropped[mark[0]] = max(mark[1], r.undropped.get(mark[0], 0))
            if member is not None and m.is_gone(member.mark, self.roster.gone):
                r.lose(mark[0])
        effects: list[Effect] = [Gone(*mark), Tell("gone", mark[0], mark[1], data={"reason": reason})]
        return [*effects, *self._broadcast(m.Roster((), (mark,)))]

    def _broadcast(self, message: m.FromCoordinator) -> list[Effect]:
        return [Send(x.conn, message) for x in self.roster.connected() if x.conn is not None]

    # ------------------------------------------------------------ gathering

    def _step(self, now: float) -> list[Effect]:
        """What has become due: contenders, the end of gathering, rollbacks, rounds."""
        effects: list[Effect] = []
        for conn, (hello, since) in list(self._contenders.items()):
            rival = self.roster.members.get(hello.replica)
            if rival is None or rival.conn is None:
                effects += self._contend(now, conn, hello, since)
        if not self.running:
            if self._first_s is not None and self._may_open(now):
                effects += self._open(now)
        elif rolled := self._rollback(now):
            return effects + rolled
        if self.running:
            for r in self.rounds:
                effects += r.step(now)
        return effects

    def _veterans(self) -> list[m.Hello]:
        return [h for h in self._hellos.values() if h.positions]

    def _unheard(self) -> list[Member]:
        """Members that may hold something that nobody here has told of."""
        reborn = {h.replica for h in self._hellos.values() if h.incarnation == 0}
        return [
            x for x in self.roster.members.values() if x.mark not in self._heard and x.replica not in reborn
        ]

    def _known_version(self) -> bool:
        """Whether the journal knows of a version of this job."""
        return bool(self._saved and self._saved.decided)

    def _open_by_s(self) -> float:
        """When gathering ends at the latest, judged by what was heard so far."""
        assert self._first_s is not None
        if self._veterans():
            # The journal knows what was decided, so that nothing can be reversed by not waiting: just a fair chance.
            return self._first_s + (self.sync.dead_after_s if self._known_version() else self.sync.recovery_s)
        if self._unheard():
            return self._first_s + max(self.sync.start_s, self.sync.recovery_s)
        return self._first_s + self.sync.start_s

    def _may_open(self, now: float) -> bool:
        if not self._hellos:
            return False
        if self._veterans():  # WAIT
            return not self._unheard() or now >= self._open_by_s()
        if self._unheard():  # what they hold may come back; with a journal we know that it exists
            return not self._known_version() and now >= self._open_by_s()
        wanted = self.sync.start_replicas  # COLD
        return (wanted is not None and len(self._hellos) >= wanted) or now >= self._open_by_s()

    def _waiting_for(self, now: float) -> str:
        if self._first_s is None:
            return "waiting for the first replica"
        left = max(0.0, self._open_by_s() - now)
        if self._veterans() or self._unheard():
            names = ", ".join(sorted(x.replica for x in self._unheard())[:5]) or "nobody"
            return f"recovering: waiting for {names}, {left:.0f} s at most"
        wanted = self.sync.start_replicas
        if wanted is None:
            return f"{len(self._hellos)} connected; the job starts in {left:.0f} s (set start_replicas to start at once)"
        return f"{len(self._hellos)} of {wanted} replicas connected; the job starts in {left:.0f} s at most"

    def _open(self, now: float) -> list[Effect]:
        """Gathering ends: finds the truth among the journal and the hellos, then welcomes everybody."""
        hellos, self._hellos = self._hellos, {}
        veterans = [h for h in hellos.values() if h.positions]
        first = min(hellos.values(), key=lambda h: (not h.initial, h.replica))
        effects: list[Effect] = []
        for r in self.rounds:
            effects += self._restore(r, veterans) if veterans else self._cold(r, first)
        self._numbers.restart(self.epoch)
        self.running, self._first_s, self._saved = True, None, None
        top = self.rounds[0]
        name = "recover" if veterans else "start"
        effects.append(
            Tell(name, version=top.at.version, inner_step=top.inner_step, data={"epoch": self.epoch})
        )
        # Holders first, so that the others are told of sources.
        order = sorted(hellos.items(), key=lambda x: (x[1] is not first, not x[1].positions, x[1].replica))
        for conn, hello in order:
            if hello.incarnation == 0:
                effects += self._know(now, hello.replica, self.roster.next_incarnation(hello.replica))
            effects += self._admit(now, conn, hello)
            if not veterans and hello is first and not hello.initial:
                effects += self._start_anyway(hello.replica)
        for r in self.rounds:  # at the start of a job nobody is a latecomer
            for member in self.roster.connected():
                if r.holds(member):
                    member.newcomer.discard(r.fragment)
        return effects

    def _cold(self, r: Rounds, first: m.Hello) -> list[Effect]:
        """COLD: version 0 is the initial state of one member, journalled like any decision."""
        effects: list[Effect] = [Rollback(r.fragment, -1)]
        chain = cold_chain(r.fragment, first.initial)
        r.history.clear()
        r.restore(m.Position(r.fragment, 0, chain), 0)
        r.last = None
        return [*effects, Decided(r.fragment, 0, 0, first.initial, chain, 0, ())]

    def _start_anyway(self, replica: str) -> list[Effect]:
        """A reborn replica whose state is all that is left of a job: that state becomes version 0."""
        member = self.roster.members[replica]
        effects: list[Effect] = []
        for r in self.rounds:
            member.held[r.fragment] = r.at
            if member.conn is not None:
                effects.append(Send(member.conn, m.Start(r.at)))
        return effects

    def _restore(self, r: Rounds, veterans: list[m.Hello]) -> list[Effect]:
        """The truth of one fragment: the highest version that the journal or a living replica knows."""
        saved = [d for d in (self._saved.decided if self._saved else ()) if d.fragment == r.fragment]
        reports = [(p, h) for h in veterans for p in h.positions if p.fragment == r.fragment]
        for d in saved:
            r.history[d.version] = d.chain
        r.last = saved[-1] if saved else None
        top = max([p.version for p, _ in reports] + [d.version for d in saved])
        if saved and saved[-1].version == top:
            r.restore(m.Position(r.fragment, top, saved[-1].chain), saved[-1].inner_step)
            return []
        votes = Counter(p for p, _ in reports if p.version == top)
        truth = min(votes, key=lambda p: (-votes[p], p.chain))
        inner_step = max(h.inner_step for p, h in reports if p == truth)
        r.restore(truth, inner_step)
        r.last = None
        return []

    def _rollback(self, now: float) -> list[Effect]:
        """ROLLBACK: when every holder of the highest version is gone, the job gathers anew."""
        for r in self.rounds:
            if any(_may_hold(r, x) for x in self.roster.members.values()):
                continue
            effects: list[Effect] = [
                Tell("rollback", fragment=r.fragment, version=r.at.version, inner_step=r.inner_step),
                *(Rollback(x.fragment, -1) for x in self.rounds),
                *self._new_epoch(self.epoch + 1),
            ]
            for member in self.roster.connected():
                assert member.conn is not None
                effects += [Close(member.conn), *self._away(now, member)]
            self.running, self._first_s, self._saved = False, None, None
            self._heard.clear()
            self._hellos.clear()
            for x in self.rounds:
                x.history.clear()
                x.last = None
                x.restore(m.Position(x.fragment, -1, ""), 0)
            if not self.roster.members:
                self.lines = None  # everybody has left: the next one defines the job
            return effects
        return []

    def _new_epoch(self, epoch: int) -> list[Effect]:
        self.epoch, self._journalled_epoch = epoch, True
        return [Epoch(epoch)]


def cold_chain(fragment: int, initial: str) -> str:
    """CHAIN of version 0: it names the initial state, so that equal starts need no fetch."""
    return hashlib.sha256(f"cold|{fragment}|{initial}".encode()).hexdigest()[:32]


def _may_hold(r: Rounds, member: Member) -> bool:
    """Whether a member holds the current version, or may hold it and is away."""
    return r.holds(member) or (member.conn is None and r.fragment not in member.held)


def _sync(settings: dict[str, int | float | str | None]) -> Sync:
    names = {f.name for f in fields(Sync)}
    return Sync(**{k: v for k, v in settings.items() if k in names})  # type: ignore[arg-type]
