"""The coordinator side of the outer-sync protocol: a pure state machine for one job.

Two phases. In the startup phase (`Startup`: after a start, a restart or a rollback) it keeps hellos and decides
nothing. While it runs, each fragment's `Rounds` do the work. Here are the inputs, the answer to a hello, and the
passage from one phase to the other; `Members` has what happens to members.

Connections are numbers that the shell gives. Time is seconds on any steady clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.admission import Contenders, misfit, refuse, sync_of
from ftopt.sync.protocol.coordinator.assignment import Assignment
from ftopt.sync.protocol.coordinator.attempts import AttemptNumbers
from ftopt.sync.protocol.coordinator.effects import Close, Effects, Emit, Epoch, Finished, Halt, JournalState, SendTo
from ftopt.sync.protocol.coordinator.loss import Lost
from ftopt.sync.protocol.coordinator.members import Members
from ftopt.sync.protocol.coordinator.only_holders import LOST_WITH_IT, OnlyHolders
from ftopt.sync.protocol.coordinator.roster import Member, send
from ftopt.sync.protocol.coordinator.rounds import Rounds
from ftopt.sync.protocol.coordinator.spares import over
from ftopt.sync.protocol.coordinator.startup import Startup
from ftopt.sync.protocol.settings import Sync

_SUPERSEDED = "superseded by a newcomer"
_DIED = "its process has ended, and another one has come in its place"
_TOO_LATE = "the job had ended before it held a state"

_ROLLED_BACK = "no replica holds the newest version any more: the job goes on from what the replicas hold"


class Coordinator:
    """The machine. Every input returns the effects that it causes, in the order in which they must happen.

    Args:
        job: the job's name.
        saved: what the journal holds, if there is one.
        now: the clock.
        life: a number above that of any earlier life, also of one whose journal is lost (seconds since 1970): epochs,
            and with them chains and attempt numbers, are used once.
        reachable_s: since when replicas can reach it, on the clock of ``now``; minus infinity for a new job, of which
            none can live.
        since_1970_s: what the clock of ``now`` is behind that of the world, for people who read when a job has failed.
    """

    def __init__(
        self,
        job: str,
        *,
        saved: JournalState | None = None,
        now: float = 0.0,
        life: int = 1,
        reachable_s: float = -math.inf,
        since_1970_s: float = 0.0,
    ) -> None:
        self.job = job
        self.failed = saved.failed if saved else None
        """LOSS: why the job has ended for all; None while it has not."""
        self._since_1970_s = since_1970_s
        self.epoch = max(saved.epoch + 1 if saved else 1, life)
        self.sync = Sync()
        self.lines: dict[str, str] | None = None
        self.halted = False
        self.looks = 0
        """How often it has looked at what is due. While this stands still, `deadline_s` can only move on."""
        self.members = Members()
        self.roster = self.members.roster
        self._only_holders = OnlyHolders(self.members)
        self.startup: Startup | None = Startup(self.roster, saved, reachable_s=reachable_s)
        self._reachable_s = reachable_s
        self._numbers = AttemptNumbers(self.epoch, max((d.attempt for d in saved.decided), default=0) if saved else 0)
        self._contenders = Contenders(self.roster)
        self._journalled_epoch = False
        if saved:
            for incarnation_id in saved.gone:
                self.roster.forget(incarnation_id)
            self.members.ended = any(self.roster.is_gone(x) for x in saved.finished)
            for incarnation_id in saved.roster:
                if not self.roster.is_gone(incarnation_id):
                    self.roster.know(incarnation_id, now)
                    self.roster.members[incarnation_id[0]].finished = incarnation_id in saved.finished
            self.members.spares.remember(saved)
            if saved.left_early is not None:
                self.members.losses.remember(now, saved.left_early)

    @property
    def running(self) -> bool:
        return self.startup is None

    @property
    def remembers(self) -> bool:
        """Whether the job has had a state, as far as it knows: what may be restored, and that it has ended."""
        return self.startup is None or bool(self.startup.lost) or self.members.ended

    @property
    def rounds(self) -> list[Rounds]:
        return self.members.rounds

    @property
    def assignment(self) -> Assignment:
        return self.members.assignment

    # ------------------------------------------------------------ inputs

    def receive(self, now: float, conn: int, message: m.FromReplica) -> Effects:
        if self.halted:
            return [Close(conn)]
        if self.failed is not None:
            return [*([SendTo(conn, self.failed)] if isinstance(message, m.Hello) else []), Close(conn)]
        if isinstance(message, m.Hello):
            return self._hello(now, conn, message) + self._step(now)
        member = self.roster.by_conn(conn)
        if member is None:
            return []  # not welcomed yet, or superseded: what it says now it says again in its next hello
        self.roster.hear(member, now)
        effects = self._from_member(now, member, message)
        if isinstance(message, m.Heartbeat):
            moves, told = member.progress(now, message), self.members.speeds.heard(now, member)
            effects += told
            if not (moves or told or self._contenders):
                return effects
        if not effects and self._changes_nothing(now, member, message):
            return effects
        return effects + self._step(now)

    def _changes_nothing(self, now: float, member: Member, message: m.FromReplica) -> bool:
        """Whether a proposal or a result is one of many that are still waited for: a round of n replicas must not take
        n looks at each of n."""
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
            self.startup.lose(now, conn)
        member = self.roster.by_conn(conn)
        effects: Effects = []
        if member is not None:
            effects, member.hung_up = self.members.away(now, member), True
        return effects + self._step(now)

    def tick(self, now: float) -> Effects:
        if self.halted or self.failed is not None:
            return []
        effects: Effects = []
        for member in self.roster.silent(now, self.sync.dead_after_s):
            effects += self.members.away(now, member, close=True)
        for member, due_s in self._forgettable():
            if now >= due_s:
                usual = now >= member.lost_s + self.sync.gone_after_s
                reason = "away for longer than gone_after_s" if usual else LOST_WITH_IT
                self.members.losses.note(member, reason)  # it may count as lost from this very moment on
                effects += self.members.gone(member.incarnation_id, reason)
        for member, due_s in self._tail():
            if now >= due_s:
                reason = "it holds the rest of the data, and has done nothing with it for sync.tail_s"
                self.assignment.gave_up(member.replica)
                self.members.losses.note(member, reason)
                effects += self.members.gone(member.incarnation_id, reason)
        return effects + self._step(now)

    def deadline_s(self) -> float:
        """When `tick` is to be called at the latest, if nothing happens before."""
        if self.halted or self.failed is not None:
            return math.inf
        due = [self.roster.heard_s() + self.sync.dead_after_s]
        made_due_s = self._stepped_s + 0.01  # by a step
        due.append(max(self._forgettable_s(), made_due_s))
        due += [max(due_s, made_due_s) for _, due_s in self._tail()]
        if self.running:
            due.append(max(self.members.spares.deadline_s(self.sync), made_due_s))
        if self.startup is not None and not math.isinf(self._stepped_s):
            due.append(self.startup.next_s(self._stepped_s))
        due.append(self._contenders.next_s(self._stepped_s, self.sync.dead_after_s))
        due += [r.deadline_s() for r in self.rounds if self.running]
        due.append(self.members.losses.next_s(self._stepped_s, self._missed()))
        return min(due, default=math.inf)

    _stepped_s = -math.inf

    # ------------------------------------------------------------ hellos

    def _hello(self, now: float, conn: int, hello: m.Hello) -> Effects:
        if refusal := misfit(self.job, self.lines, hello, self.assignment.samples):
            return refuse(conn, hello, "final", refusal)
        if self.lines is None and self.startup is not None:
            self.lines, self.sync = dict(hello.lines), sync_of(hello)
            self.startup.sync = self.sync
            self.members.define(hello.fragments, self.sync, self._numbers, hello.samples)
        if self.startup is not None:
            self.startup.know_end(self.assignment.samples, finished=self.members.ended)
        if self._alone():
            self.roster.missed_by_nobody(now)
        effects: Effects = []
        if hello.epoch >= self.epoch and self.startup is not None:
            effects += self._new_epoch(hello.epoch + 1)
        elif hello.epoch > self.epoch:
            self.halted = True
            reason = f"replica {hello.replica} knows epoch {hello.epoch}, this coordinator is of epoch {self.epoch}"
            return [Emit("halt", data={"reason": reason}), Halt(reason)]
        elif not self._journalled_epoch:
            effects += self._new_epoch(self.epoch)
        if self._waits(hello):
            return [*effects, *self._contenders.add(now, conn, hello)]
        return effects + self._let_in(now, conn, hello)

    def _waits(self, hello: m.Hello) -> bool:
        """Whether another process is connected as the replica, or a newcomer finds one that waits to be. One of an
        earlier incarnation is told at once that it was superseded; one that was let in with a later one supersedes."""
        rival = self.roster.members.get(hello.replica)
        if rival is None or rival.conn is None:
            return not hello.incarnation and self._contenders.precede(hello)
        if hello.incarnation and hello.address == rival.address:
            return False
        if hello.was_let_in:
            return hello.incarnation == rival.incarnation
        return not hello.incarnation or hello.incarnation >= rival.incarnation

    def _let_in(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """No other process of its id is here."""
        living = self._living(hello.gone) if hello.resumed else set()
        if living and hello.incarnation:
            names = ", ".join(sorted(replica for replica, _ in living))
            reason = f"its checkpoint is resumed without {names}, but the job goes on, with them"
            return refuse(conn, hello, "gone", reason)
        effects = self.members.losses.resumed() if hello.resumed and self.startup is not None else []
        for incarnation_id in hello.gone:
            if not self.roster.is_gone(incarnation_id) and incarnation_id not in living:
                effects += self._learn_gone(now, hello, incarnation_id)
        for incarnation_id in hello.roster:
            effects += self.members.know(now, incarnation_id)
        return effects + (self._return if hello.incarnation else self._newcomer)(now, conn, hello)

    def _living(self, gone: tuple[m.IncarnationId, ...]) -> set[m.IncarnationId]:
        """Those of them that are here."""
        here = {x.incarnation_id for x in self.roster.present(gone) if x.conn is not None}
        if self.startup is not None:
            here |= set(filter(self.startup.is_let_in, gone))
        return here

    def _learn_gone(self, now: float, hello: m.Hello, incarnation_id: m.IncarnationId) -> Effects:
        """FENCE. A replica that restores a checkpoint of an incarnation that is gone comes back as the next one."""
        replica, incarnation = incarnation_id
        member = self.roster.members.get(replica)
        reads = self.startup is not None and replica in self.startup.sent
        known = member is not None and member.incarnation <= incarnation  # else it ended before this process began
        waited = reads and known
        name = dict(hello.adopted_by).get(replica)
        adopter = next((x for x in hello.roster if x[0] == name and not self.roster.is_gone(x)), None)
        reason = f"reported by {hello.replica}{'' if known else ', gone before'}"
        effects = self.members.gone(incarnation_id, reason, adopter=adopter)
        return [*effects, *self._await_restored(now, (replica, incarnation + 1))] if waited else effects

    def _await_restored(self, now: float, incarnation_id: m.IncarnationId) -> Effects:
        """A replica reads a checkpoint, and may hold a version when it comes back."""
        effects = self.members.know(now, incarnation_id)
        self.roster.members[incarnation_id[0]].in_doubt = True
        return effects

    def _return(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """A replica comes back as the incarnation that it was; during startup it is heard."""
        incarnation_id = (hello.replica, hello.incarnation)
        effects = self.members.know(now, incarnation_id)
        member = self.roster.current(incarnation_id)
        if member is not None and member.conn is not None and member.conn != conn:
            effects += self.members.away(now, member, close=True)
            member = self.roster.current(incarnation_id)  # None: it had said `Bye`, and has left with that connection
        replaced = member is not None and hello.was_let_in and member.address not in ("", hello.address)
        if member is None or replaced:  # or another process has resumed as it meanwhile, and holds other units
            reason = "this incarnation has left, was given up, or superseded"
            return [*effects, *refuse(conn, hello, "gone", reason)]
        if self.startup is not None:
            return effects + self.startup.hear(now, conn, hello)
        return effects + self.members.admit(now, conn, hello, epoch=self.epoch)

    def _newcomer(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """A new incarnation supersedes the one of its id; during startup it waits for what becomes of that one."""
        if self.startup is not None:
            if hello.standby and not self.startup.trainers() and self.members.spares.come_late:
                return [*over(conn, (hello.replica, 0)), Close(conn)]
            return self.startup.hear(now, conn, hello)
        effects: Effects = []
        old = self.roster.members.get(hello.replica)
        trains = self.members.spares.will_train(hello)
        adopted_work = self.members.adopted_work(old) if old is not None and trains else None
        if old is not None:
            self.members.losses.note(old, _DIED)
            effects += self.members.spares.restarted(hello)
            effects += self.members.gone(old.incarnation_id, _SUPERSEDED)
            if not all(
                self._survives(r) for r in self.rounds
            ):  # nobody holds the state that it would fetch: a rollback
                return [*effects, SendTo(conn, m.Hold(_ROLLED_BACK)), Close(conn)]  # follows, and it comes again
        effects += self.members.know(now, (hello.replica, self.roster.next_incarnation(hello.replica)))
        if adopted_work is None:
            return effects + self.members.admit(now, conn, hello, epoch=self.epoch)
        self.roster.members[hello.replica].continues_predecessor = True
        effects += self.members.admit(now, conn, replace(hello, claim=adopted_work.ranges), epoch=self.epoch)
        return [*effects, SendTo(conn, adopted_work)]

    # ------------------------------------------------------------ members

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
                told, member.finished = member.finished, True
                return [] if told else [Finished(*member.incarnation_id)]
            case m.Leaving():
                member.leaving = True
            case m.Bye(early=early):
                self.members.bye(member, early=early)
        return []

    def _has(self, fragment: int) -> bool:
        return 0 <= fragment < len(self.rounds)

    def _alone(self) -> bool:
        here = self.startup.hellos if self.startup is not None else self.roster.connected()
        return not here

    def _forgettable(self) -> list[tuple[Member, float]]:
        """Members that are away, while there is a replica that can go on without them, and when they are given up."""
        if self._alone():
            return []
        absent = self.roster.away() if self.startup is None else self.startup.absent()
        early = self._only_holders.given_up_s(self.sync) if absent and self.running else {}
        return [(x, early.get(x.incarnation_id, x.lost_s + self.sync.gone_after_s)) for x in absent]

    def _missed(self) -> Sequence[Member]:
        """LOSS: members that are away, while others are here."""
        if not self.members.losses.matter or self._alone():
            return []
        return self.roster.away() if self.startup is None else self.startup.absent()

    def _forgettable_s(self) -> float:
        """When the first of these is given up; inf: none is."""
        if self._alone():
            return math.inf
        if self.startup is not None:
            return self.startup.absent_s() + self.sync.gone_after_s
        lost_s = self.roster.lost_s()
        early = self._only_holders.given_up_s(self.sync) if lost_s < math.inf else {}
        return min(lost_s + self.sync.gone_after_s, *early.values(), math.inf)

    def _tail(self) -> list[tuple[Member, float]]:
        return self.members.tail(self.sync) if self.running else []

    # ------------------------------------------------------------ phases

    def _step(self, now: float) -> Effects:
        effects = self._go_on(now)
        lost = None if self.failed is not None else self.members.losses.first(now, self._missed())
        return effects if lost is None else effects + self._fail(now, lost)

    def _fail(self, now: float, lost: Lost) -> Effects:
        """LOSS: the job ends for all who are here, and for all who come."""
        saved = [self.startup.saved(r.fragment) if self.startup is not None else [] for r in self.rounds]
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
        return [*effects, *self._contenders.close()]  # who will be told when they come again

    def _go_on(self, now: float) -> Effects:
        if self.halted or self.failed is not None:
            return []
        self._stepped_s = now
        self.looks += 1
        effects = self.members.see_off(now)
        for conn, hello, refusal in self._contenders.settle(now, self.sync):
            effects += refuse(conn, hello, "final", refusal) if refusal else self._let_in(now, conn, hello)
        if self.startup is not None:
            if superseded := self.startup.superseded(now):
                for member in superseded:
                    self.members.losses.note(member, _DIED)
                    effects += self.members.spares.restarted(self.startup.heard(member.replica))
                    effects += self.members.gone(member.incarnation_id, _SUPERSEDED)
                effects += self.startup.tell(now)
            for conn, hello in self.startup.outlived(now):
                effects += refuse(conn, hello, "gone", "this incarnation was given up meanwhile")
            self.startup.know_end(self.assignment.samples, finished=self.members.ended)
            for hello, told in self.startup.latecomers(now):
                effects += told
                if hello.incarnation:
                    effects += self.members.gone((hello.replica, hello.incarnation), _TOO_LATE)
            if not self.startup.hellos and not self.roster.members:
                self.lines = None  # the next one defines the job
            if self.startup.may_end(now):
                restored = self._restore_checkpoints(now, self.startup)
                effects += restored or self._open(now, self.startup)
        if self.startup is None:
            effects += self.members.relieve(now, self.sync)
            if not all(self._survives(r) for r in self.rounds):
                return effects + self._rollback(now)
            for r in self.rounds:
                effects += r.step(now)
            effects += self.assignment.step(now)
            effects += self._only_holders.tell(now, self.sync)
        return effects

    def _open(self, now: float, startup: Startup) -> Effects:
        """The startup phase ends: finds the truth among the journal and the hellos, then welcomes everybody."""
        self.startup = None
        state_holders, initial_source = startup.state_holders(), startup.initial_source()
        effects: Effects = []
        for r in self.rounds:
            effects += startup.restore(r.versions) if state_holders else startup.cold_start(r.versions, self.epoch)
            r.restart()
        top = self.rounds[0].versions
        name = "recover" if state_holders else "start"
        data: dict[str, object] = {"epoch": self.epoch, "versions": [r.at.version for r in self.rounds]}
        effects += self.assignment.open(startup, top.at, top.last.done)
        if self.assignment.samples is not None:
            data |= {"done": top.last.done, "samples": asdict(self.assignment.samples)}
        if last := [r.versions.journalled() for r in self.rounds if r.versions.last.members]:
            data["decided"] = last
        if not state_holders and (anew := startup.anew()):
            effects += [SendTo(conn, m.Hold(anew)) for conn in sorted(startup.hellos)]
        effects.append(Emit(name, version=top.at.version, inner_step=top.last.inner_step, data=data))
        newcomers = {hello.replica: hello for hello in startup.hellos.values() if hello.incarnation == 0}
        for replica in sorted(newcomers):  # before any is welcomed, who would be sent an update for each of the others
            if state_holders:
                effects += self.members.spares.restarted(newcomers[replica])
            effects += self.members.know(now, (replica, self.roster.next_incarnation(replica)))
        for conn, hello in sorted(startup.hellos.items(), key=lambda x: (x[0] != initial_source, x[1].replica)):
            own = not state_holders and conn == initial_source
            effects += self.members.admit(now, conn, hello, epoch=self.epoch, initial_source=own)
        for conn, hello in startup.rivals.items():
            effects += self._contenders.add(now, conn, hello)
        self.members.spares.opened()
        for r in self.rounds:  # at the start of a job nobody is a latecomer
            for member in self.roster.connected():
                if r.versions.held_by(member):
                    member.newcomer.discard(r.fragment)
        return effects

    def _restore_checkpoints(self, now: float, startup: Startup) -> Effects:
        """RESTORE: those that have the newest checkpoint restore it; they come back with it, and are waited for."""
        effects: Effects = []
        sent: list[tuple[int, m.IncarnationId, int]] = []
        for conn, hello, at in startup.restorers():
            startup.lose(now, conn)
            incarnation_id = (hello.replica, hello.incarnation or self.roster.next_incarnation(hello.replica))
            effects += self._await_restored(now, incarnation_id)
            startup.sent.add(hello.replica)
            sent.append((conn, incarnation_id, at.version))
        roster = tuple(x for _, x, _ in sent)
        for conn, x, version in sent:
            effects += [Emit("restore", *x, version=version), SendTo(conn, m.Restore(x[1], roster))]
        return effects

    def _survives(self, r: Rounds) -> bool:
        return self.roster.is_held(r.at) or any(x.may_hold(r.at) for x in self.roster.away())

    def _rollback(self, now: float) -> Effects:
        """ROLLBACK: every holder of the current version is gone. The job starts up again from an earlier one."""
        effects: Effects = [
            Emit("rollback", fragment=r.fragment, version=r.at.version, inner_step=r.versions.last.inner_step)
            for r in self.rounds
            if not self._survives(r)
        ]
        effects += send(self.roster.connected(), m.Hold(_ROLLED_BACK))
        for member in self.roster.connected():
            effects += self.members.away(now, member, close=True)
        effects += self._contenders.close()
        last = self.rounds[0].versions.last
        self.startup = Startup(self.roster, lost=last, reachable_s=self._reachable_s)
        self.startup.sync = self.sync
        if not self.roster.members:
            self.lines = None  # everybody has left: the next one defines the job
        return [*effects, *self._new_epoch(self.epoch + 1)]

    def _new_epoch(self, epoch: int) -> Effects:
        self.epoch, self._journalled_epoch = epoch, True
        self._numbers.restart(epoch)
        return [Epoch(epoch)]
