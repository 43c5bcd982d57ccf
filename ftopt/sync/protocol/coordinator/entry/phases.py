"""The two phases of a job, and the passage from one to the other.

In the startup phase (`Startup`: after a start, a restart or a rollback) hellos are kept and nothing is decided. While
the job runs, each fragment's `Rounds` do the work. Each way back to the startup phase begins a new epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.admission import Contenders, policy_of, refuse
from ftopt.sync.protocol.coordinator.entry.startup import Startup
from ftopt.sync.protocol.coordinator.members.members import Members
from ftopt.sync.protocol.coordinator.roster.effects import (
    Close,
    Decided,
    Effects,
    Emit,
    Epoch,
    Forgotten,
    Halt,
    JournalState,
    SendTo,
)
from ftopt.sync.protocol.coordinator.roster.roster import Member, send
from ftopt.sync.protocol.coordinator.rounds.assignment import Claims
from ftopt.sync.protocol.coordinator.rounds.attempts import AttemptNumbers
from ftopt.sync.protocol.coordinator.rounds.rounds import Rounds
from ftopt.sync.protocol.policy import FaultPolicy

_MORE = 1024
"""Epochs that may have begun elsewhere since the coordinator's own, if its clock is wrong."""
_TOO_LATE = "it came when the job had ended"
FORGOTTEN = "it was evicted long ago"
INCOMPLETE = "no replica holds the whole state of the job, so that the job starts anew"
ROLLED_BACK = "no replica holds the newest version any more: the job goes on from what the replicas hold"


class Phases:
    """A job's phase and epoch, and what its first replica has defined.

    Args:
        members: its members; the roster is empty yet.
        contenders: processes that wait until it is known whether another process of their id lives.
        saved: the journal's state.
        lost: the last version of fragment 0 that the job had, if it starts over without a journal.
        life, reachable_s: as for `Coordinator`.
    """

    def __init__(
        self,
        members: Members,
        contenders: Contenders,
        saved: JournalState | None,
        *,
        lost: Decided | None,
        life: float,
        reachable_s: float,
    ) -> None:
        self.members, self.roster, self.contenders = members, members.roster, contenders
        life = min(life, limits.MAX_EPOCH - 2 * limits.FAR_EPOCHS)  # whatever the clock says, there is room above
        self.epoch = max(saved.epoch + 1 if saved else 1, int(life))
        self._far_epoch = int(life) + limits.FAR_EPOCHS
        self.halted = False
        """Whether a later epoch is known, so that another coordinator has the job."""
        self.policy = FaultPolicy()
        self.lines: dict[str, str] | None = None
        """The lines on which replicas must agree; None before the first replica."""
        self.given_up: set[str] = set()
        """Replicas that their launcher does not start again."""
        self.startup: Startup | None = Startup(
            self.roster, saved, lost=[lost] if lost else [], reachable_s=reachable_s, given_up=self.given_up
        )
        """The startup phase; None while the job runs."""
        self.began_epoch = 0
        """The epoch of the cold start by which this coordinator began the job; 0: the job went on from a state."""
        self._reachable_s = reachable_s
        decided = [*(saved.decided if saved else ()), *([lost] if lost else [])]
        self._numbers = AttemptNumbers(self.epoch, [d.attempt for d in decided], offset=int(life % 1 * 1e6))
        self._journalled_epoch = False

    # ------------------------------------------------------------ who is here

    def alone(self) -> bool:
        """Whether no replica is here."""
        here = self.startup.hellos if self.startup is not None else self.roster.connected()
        return not here

    def absent(self) -> Sequence[Member]:
        """Members that are not here."""
        return self.roster.away() if self.startup is None else self.startup.absent()

    def unheld(self) -> list[Rounds]:
        """Fragments whose current version nobody holds and nobody may hold (ROLLBACK)."""
        unheld = [r for r in self.members.rounds if not self.roster.is_held(r.at)]
        return [r for r in unheld if not any(x.may_hold(r.at) for x in self.roster.away())]

    # ------------------------------------------------------------ what a hello brings

    def define(self, hello: m.Hello) -> None:
        """Lets the first replica define the job."""
        if self.startup is None or self.lines is not None:
            return
        self.lines, self.policy = dict(hello.lines), policy_of(hello)
        self.startup.policy = self.policy
        self.members.define(hello, self.policy, self._numbers)

    def outranks(self, hello: m.Hello) -> bool:
        """Whether a member finds the job defined by newcomers alone, who came first when the coordinator had started
        with its journal."""
        startup, known = self.startup, self.roster.members.get(hello.replica)
        if startup is None or known is None or not hello.was_let_in:
            return False
        return known.incarnation == hello.incarnation and not any(x.incarnation for x in startup.hellos.values())

    def turn_away(self, now: float) -> Effects:
        """The job is defined anew; those that are here come again, and are compared with that."""
        assert self.startup is not None
        conns = [*self.startup.rivals, *self.startup.hellos]
        for conn in conns:
            self.startup.lose(now, conn)
        self.startup.turned_away.clear()
        self.lines = None
        return [*map(Close, conns), *self.contenders.close()]

    def false_epoch(self, hello: m.Hello) -> str:
        """Why the epoch of a hello cannot be one of this job, "" if it can: a false one would last forever."""
        if hello.epoch <= max(self._far_epoch, self.epoch + _MORE):
            return ""
        return (
            f"replica {hello.replica} knows epoch {hello.epoch} of the job, which is more than ten years ahead of the "
            f"coordinator's clock ({self.epoch}); epochs are seconds since 1970: set the clock right"
        )

    def false_life(self, hello: m.Hello) -> str:
        """Why a life in a hello cannot be one of this job, "" if all can: later lives would have to exceed it."""
        known = max(limits.MAX_STEPS // 2, self.roster.newest_life() + limits.FAR_LIVES)
        named = [hello.incarnation, hello.horizon.life, *(life for _, life in (*hello.roster, *hello.gone))]
        if max(named) <= known:
            return ""
        return f"replica {hello.replica} names incarnation {max(named)}, far beyond any of this job; restart it"

    def unlike(self, hello: m.Hello) -> str:
        """Why the number of fragments in a hello is not the job's, "" if it is, or the job is not defined yet."""
        count = len(self.members.rounds)
        if self.lines is None or hello.fragments == count:
            return ""
        return f"replica {hello.replica} has {hello.fragments} fragments, and the job {count}; use the same settings"

    def know_end(self) -> None:
        """END: tells the startup phase whether the job has ended."""
        if self.startup is not None:
            self.startup.past.know_end(self.members.assignment.samples, finished=self.members.ended)

    def hear_epoch(self, hello: m.Hello) -> Effects:
        """Compares the epoch that a replica knows. During startup, one that is not below this coordinator's makes it
        begin a higher one. While the job runs, a higher one is another coordinator's, and this one halts. The first
        hello journals the epoch."""
        if hello.epoch >= self.epoch and self.startup is not None:
            return self._new_epoch(hello.epoch + 1)
        if hello.epoch > self.epoch:
            self.halted = True
            reason = f"replica {hello.replica} knows epoch {hello.epoch}, this coordinator is of epoch {self.epoch}"
            return [Emit("halt", data={"reason": reason}), Halt(reason)]
        return [] if self._journalled_epoch else self._new_epoch(self.epoch)

    def await_restored(self, now: float, incarnation_id: m.IncarnationId) -> Effects:
        """RESTORE: waits for a replica that reads a checkpoint, and may hold a version when it comes back."""
        effects = self.members.know(now, incarnation_id)
        member = self.roster.members[incarnation_id[0]]
        member.in_doubt = member.hung_up = True  # a process that takes its place need not wait for it
        return effects

    # ------------------------------------------------------------ the startup phase, and its end

    def start_up(self, now: float) -> Effects:
        """Does all that is due in the startup phase; ends the phase when it may end."""
        effects: Effects = []
        if (startup := self.startup) is None:
            return effects
        if superseded := startup.superseded(now):
            for member in superseded:
                effects += self.members.supersede(member, startup.heard(member.replica))
            effects += startup.tell(now)
        for conn, hello in startup.outlived(now):
            if not self.roster.is_gone(incarnation_id := (hello.replica, hello.incarnation)):
                effects += self.members.gone(incarnation_id, FORGOTTEN)
            effects += refuse(conn, hello, "gone", "this incarnation was evicted meanwhile")
        self.know_end()
        for hello, told in startup.latecomers(now):
            effects += told
            if hello.incarnation:
                effects += self.members.gone((hello.replica, hello.incarnation), _TOO_LATE)
        if not startup.hellos and not self.roster.members:
            self.lines = None  # the next one defines the job
            startup.turned_away.clear()
        if startup.may_end(now):
            effects += (
                self._restore_checkpoints(now, startup) or self._reset_holders(now, startup) or self._open(now, startup)
            )
        return effects

    def _reset_holders(self, now: float, startup: Startup) -> Effects:
        """COLD: resets the replicas that hold newer versions of some fragments only, as at a rollback when the last
        holder of another fragment is gone. They come back as newcomers, so that none of their steps vanishes unsaid."""
        effects: Effects = []
        if startup.state_holders():
            return effects
        for conn, hello in sorted(startup.hellos.items()):
            if hello.incarnation and any(at.version for at in hello.positions):
                startup.lose(now, conn)
                effects += self.members.gone((hello.replica, hello.incarnation), INCOMPLETE)
                effects += refuse(conn, hello, "gone", INCOMPLETE)
        return effects

    def _open(self, now: float, startup: Startup) -> Effects:
        """Ends the startup phase: finds the true state in journal and hellos, then welcomes everybody."""
        self.startup = None
        rounds, assignment = self.members.rounds, self.members.assignment
        truth, state_holders = startup.truth, startup.state_holders()
        effects: Effects = []
        self.began_epoch = 0 if state_holders else self.epoch
        for r in rounds:
            effects += truth.restore(r.versions) if state_holders else truth.cold_start(r.versions, self._numbers.last)
            r.restart()
        top = rounds[0].versions
        self.roster.horizon.open(top.at.version)
        if self.roster.horizon.learned:
            effects.append(Forgotten(self.roster.horizon.told, ()))
        effects += self.members.forget_gone(self.epoch)
        name = "recover" if state_holders else "start"
        data: dict[str, object] = {"epoch": self.epoch, "versions": [r.at.version for r in rounds]}
        claims = Claims([x.incarnation_id for x in startup.absent()], truth.cursor(), truth.shares(top.at))
        effects += assignment.open(claims, top.at, top.last.done)
        if assignment.samples is not None:
            data |= {"done": top.last.done, "samples": asdict(assignment.samples)}
        if last := [r.versions.journalled() for r in rounds if r.versions.last.members]:
            data["decided"] = last
        past = startup.past
        if undone := past.undone(top.at.version) if state_holders else past.anew(startup.hellos.values()):
            data["undone"] = undone
            effects += [SendTo(conn, m.Hold(undone)) for conn in sorted(startup.hellos)]
        effects.append(Emit(name, version=top.at.version, inner_step=top.last.inner_step, data=data))
        return effects + self._welcome(now, startup, cold=not state_holders)

    def _welcome(self, now: float, startup: Startup, *, cold: bool) -> Effects:
        """Welcomes all replicas that are here; at a ``cold`` start one of them brings version 0."""
        effects: Effects = []
        initial_source = startup.truth.initial_source()
        newcomers = {hello.replica: hello for hello in startup.hellos.values() if hello.incarnation == 0}
        for replica in sorted(newcomers):  # before any welcome, which saves an update for each later one
            if not cold:
                effects += self.members.superseded(newcomers[replica])
            effects += self.members.know(now, (replica, self.roster.next_incarnation(replica)))
        for conn, hello in sorted(startup.hellos.items(), key=lambda x: (x[0] != initial_source, x[1].replica)):
            if hello.resumed and self.roster.horizon.covers(hello):
                effects += self.members.gone((hello.replica, hello.incarnation), FORGOTTEN)
                effects += refuse(conn, hello, "gone", FORGOTTEN)
                continue
            self.roster.members[hello.replica].from_start = cold
            own = cold and conn == initial_source
            effects += self.members.admit(now, conn, hello, epoch=self.epoch, initial_source=own)
        for conn, hello in startup.rivals.items():
            effects += self.contenders.add(now, conn, hello, self.policy)
        self.members.spares.opened()
        for r in self.members.rounds:  # at the start, nobody joins late
            for member in self.roster.connected():
                if r.versions.held_by(member):
                    member.newcomer.discard(r.fragment)
        return effects

    def _restore_checkpoints(self, now: float, startup: Startup) -> Effects:
        """RESTORE: asks the replicas with the newest checkpoint to restore it; the job waits for their return."""
        effects: Effects = []
        sent: list[tuple[int, m.IncarnationId, int]] = []
        for conn, hello, at in startup.restorers():
            startup.lose(now, conn)
            incarnation_id = (hello.replica, hello.incarnation or self.roster.next_incarnation(hello.replica))
            effects += self.await_restored(now, incarnation_id)
            startup.sent[hello.replica] = at.version if at.chain else 0
            sent.append((conn, incarnation_id, at.version))
        roster = tuple(x for _, x, _ in sent)
        for conn, x, version in sent:
            effects += [Emit("restore", *x, version=version), SendTo(conn, m.Restore(x[1], roster))]
        return effects

    # ------------------------------------------------------------ back to it

    def roll_back(self, now: float) -> Effects:
        """ROLLBACK: starts the job up again from an earlier version, since every holder of the current one is gone."""
        data = {"connected": len(self.roster.connected())}
        effects: Effects = [
            Emit(
                "rollback", fragment=r.fragment, version=r.at.version, inner_step=r.versions.last.inner_step, data=data
            )
            for r in self.unheld()
        ]
        effects += send(self.roster.connected(), m.Hold(ROLLED_BACK))
        for member in self.roster.connected():
            effects += self.members.away(now, member, close=True)
        effects += self.contenders.close()
        last = [r.versions.last for r in self.members.rounds]
        left_with_it = self.members.left_with(last[0].version)
        self.startup = Startup(
            self.roster, lost=last, left_with_it=left_with_it, lines=self.lines, reachable_s=self._reachable_s,
            given_up=self.given_up,
        )  # fmt: skip
        self.startup.policy = self.policy
        if not self.roster.members:
            self.lines = None  # everybody has left: the next replica defines the job
        return [*effects, *self._new_epoch(self.epoch + 1)]

    def _new_epoch(self, epoch: int) -> Effects:
        self.epoch, self._journalled_epoch = epoch, True
        self._numbers.restart(epoch)
        return [Epoch(epoch)]
