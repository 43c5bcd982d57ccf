"""The answer to a hello: the replica is turned away, kept waiting, or let in; during startup, its hello is kept."""

from __future__ import annotations

from dataclasses import replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.admission import makes_no_sense, misfit, refuse
from ftopt.sync.protocol.coordinator.entry.phases import FORGOTTEN, ROLLED_BACK, Phases
from ftopt.sync.protocol.coordinator.members.spares import over
from ftopt.sync.protocol.coordinator.roster.effects import Close, Effects, Emit, SendTo

_BEGUN_ANEW = "the job has begun anew since this replica was part of it; it joins as the next incarnation"


class Hellos:
    """Answers the hellos of one job.

    Args:
        job: its name.
        phases: its phase and its members.
    """

    def __init__(self, job: str, phases: Phases) -> None:
        self._job, self.phases = job, phases
        self.members, self.roster, self._contenders = phases.members, phases.roster, phases.contenders

    def receive(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """Answers a hello. Its connection may be its replica's second one."""
        if refusal := makes_no_sense(self._job, hello):
            return refuse(conn, hello, "misfit", refusal)
        if refusal := self.phases.false_epoch(hello) or self.phases.false_life(hello):
            return refuse(conn, hello, "misfit", refusal)
        effects: Effects = []
        lines, samples = self.phases.lines, self.members.assignment.samples
        if refusal := misfit(self._job, lines, hello, samples) or self.phases.unlike(hello):
            if misfit(self._job, None, hello, samples) or not self.phases.outranks(hello):
                if self.phases.startup is not None and not (hello.incarnation or hello.standby):
                    self.phases.startup.turn_away(hello.replica)
                return refuse(conn, hello, "misfit", refusal)
            effects = self.phases.turn_away(now)
        self.phases.define(hello)
        self.phases.know_end()
        if self.phases.alone():
            self.roster.missed_by_nobody(now)
        effects += self.phases.hear_epoch(hello)
        if self.phases.halted:
            return effects
        if self._waits(now, hello):
            return [*effects, *self._contenders.add(now, conn, hello, self.phases.policy)]
        return effects + self._let_in(now, conn, hello)

    def settle(self, now: float) -> Effects:
        """Turns away or lets in waiting processes, once it is known whether another process of their id lives."""
        effects: Effects = []
        for conn, hello, refusal in self._contenders.settle(now, self.phases.policy):
            effects += refuse(conn, hello, "final", refusal) if refusal else self._let_in(now, conn, hello)
        return effects

    def _waits(self, now: float, hello: m.Hello) -> bool:
        """Whether a process has to wait: another process is connected under its id, or waits before it. A process of an
        earlier incarnation does not wait, but hears that it was superseded; one let in as a later incarnation
        supersedes. A newcomer also waits for the return of a silent member with which a version would be lost, and
        until another holder of that version is heard, which may be dead, too."""
        rival = self.roster.members.get(hello.replica)
        if rival is None or rival.conn is None:
            awaits = rival is not None and self.phases.startup is None and self._contenders.awaits(rival, hello, now)
            return not hello.incarnation and (awaits or self._contenders.precede(hello))
        if hello.incarnation and hello.address == rival.address:
            return False
        if hello.was_let_in:
            return hello.incarnation == rival.incarnation
        return not hello.incarnation or hello.incarnation >= rival.incarnation

    def _let_in(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """Lets a process in, with no other process of its id here."""
        if self._is_forgotten(hello):
            return refuse(conn, hello, "gone", FORGOTTEN)
        if self._is_of_another_start(hello):
            return self._fork(hello, conn)
        restores = self.phases.startup is not None and hello.replica in self.phases.startup.sent
        living = self._living(hello.gone) if hello.resumed and not restores else set()
        if living and hello.incarnation:
            names = ", ".join(sorted(replica for replica, _ in living))
            reason = f"its checkpoint is resumed without {names}, but the job goes on, with them"
            return refuse(conn, hello, "gone", reason)
        effects = self.members.losses.resumed() if hello.resumed and self.phases.startup is not None else []
        effects += self._learn_horizon(hello)
        less = self.roster.horizon.knows_less(hello)
        for incarnation_id in hello.gone:
            known = self.roster.is_gone(incarnation_id) or (less and self.roster.horizon.may_cover(incarnation_id))
            if not known and incarnation_id not in living:
                effects += self._learn_gone(now, hello, incarnation_id)
        for incarnation_id in hello.roster:
            if hello.resumed or not (less and self.roster.horizon.may_cover(incarnation_id)):
                effects += self.members.know(now, incarnation_id)
        return effects + (self._return if hello.incarnation else self._newcomer)(now, conn, hello)

    def _is_of_another_start(self, hello: m.Hello) -> bool:
        """CHAIN. While the job runs: whether a process is of a former start of the job, as after standing still while
        all others were started again. In that start, other processes had the same incarnation numbers."""
        if self.phases.startup is not None or not hello.incarnation:
            return False
        if not hello.positions:
            return hello.was_let_in and hello.epoch < self.phases.began_epoch
        return not all(m.same_start(p.chain, self.members.rounds[p.fragment].at.chain) for p in hello.positions)

    def _fork(self, hello: m.Hello, conn: int) -> Effects:
        """Turns away a process of a former start, which then forgets the incarnations that it knows. Its number is not
        assigned again, unless another process of its id is on the roster."""
        known, incarnation_id = self.roster.members.get(hello.replica), (hello.replica, hello.incarnation)
        effects: Effects = [
            Emit("fork", *incarnation_id, p.fragment, p.version, data={"chain": p.chain}) for p in hello.positions[:1]
        ]
        itself = known is not None and known.incarnation == hello.incarnation and known.address in ("", hello.address)
        if (known is None or itself) and not self.roster.is_gone(incarnation_id):
            effects += self.members.gone(incarnation_id, _BEGUN_ANEW)
        return [*effects, *refuse(conn, hello, "anew", _BEGUN_ANEW)]

    def _is_forgotten(self, hello: m.Hello) -> bool:
        """HORIZON: whether a hello is of a gone and forgotten incarnation. During startup, this does not hold for a
        process that resumes from a checkpoint: the job may still go back to its state."""
        judged = hello.was_let_in if self.phases.startup is not None else hello.incarnation > 0
        return judged and self.roster.horizon.covers(hello)

    def _learn_horizon(self, hello: m.Hello) -> Effects:
        """HORIZON. A member tells a coordinator without memory which known incarnations are gone and forgotten."""
        self.roster.horizon.learn_life(hello)
        startup = self.phases.startup
        if startup is None or not hello.was_let_in or not self.roster.horizon.learn(hello):
            return []
        self.roster.changes += 1
        members = [x.incarnation_id for x in self.roster.members.values()]
        heard = {(x.replica, x.incarnation) for x in startup.hellos.values()}
        old = [x for x in members if self.roster.horizon.may_cover(x) and x not in heard]
        return [effect for x in old for effect in self.members.gone(x, FORGOTTEN)]

    def _living(self, gone: tuple[m.IncarnationId, ...]) -> set[m.IncarnationId]:
        """Those of ``gone`` that are here."""
        here = {x.incarnation_id for x in self.roster.present(gone) if x.conn is not None}
        if self.phases.startup is not None:
            here |= set(filter(self.phases.startup.is_let_in, gone))
        return here

    def _learn_gone(self, now: float, hello: m.Hello, incarnation_id: m.IncarnationId) -> Effects:
        """FENCE. Notes an incarnation that a hello reports as gone. A replica that restores a checkpoint of it comes
        back as the next one."""
        replica, incarnation = incarnation_id
        member = self.roster.members.get(replica)
        reads = self.phases.startup is not None and replica in self.phases.startup.sent
        known = member is not None and member.incarnation <= incarnation  # else it ended before this process began
        waited = reads and known
        name = dict(hello.adopted_by).get(replica)
        adopter = next((x for x in hello.roster if x[0] == name and not self.roster.is_gone(x)), None)
        by = "its next incarnation" if hello.replica == replica else hello.replica
        reason = f"reported by {by}{'' if known else ', gone before'}"
        effects = self.members.gone(incarnation_id, reason, adopter=adopter)
        return [*effects, *self.phases.await_restored(now, (replica, incarnation + 1))] if waited else effects

    def _return(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """Handles a replica that comes back as the same incarnation; during startup, its hello is kept."""
        incarnation_id = (hello.replica, hello.incarnation)
        effects = self.members.know(now, incarnation_id)
        member = self.roster.current(incarnation_id)
        if member is not None and member.conn is not None and member.conn != conn:
            effects += self.members.away(now, member, close=True)
            member = self.roster.current(incarnation_id)  # None: it had said `Bye`, and left with that connection
        replaced = member is not None and hello.was_let_in and member.address not in ("", hello.address)
        if member is None or replaced:  # replaced: another process has resumed as it meanwhile, and holds other units
            return [*effects, *refuse(conn, hello, "gone", _why_gone(hello, replaced=replaced))]
        if self.phases.startup is not None:
            return effects + self.phases.startup.hear(now, conn, hello)
        return effects + self.members.admit(now, conn, hello, epoch=self.phases.epoch)

    def _newcomer(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """Handles a newcomer, which supersedes the incarnation of its id; during startup, it waits for the fate of
        that incarnation."""
        if self.phases.startup is not None:
            if hello.standby and not self.phases.startup.trainers() and self.members.spares.come_late:
                return [*over(conn, (hello.replica, 0)), Close(conn)]
            return self.phases.startup.hear(now, conn, hello)
        effects: Effects = []
        old = self.roster.members.get(hello.replica)
        trains = self.members.spares.will_train(hello)
        adopted_work = self.members.adopted_work(old) if old is not None and trains else None
        if old is not None:
            effects += self.members.supersede(old, hello)
            if self.phases.unheld():  # nobody holds the state to fetch: a rollback follows, and it comes again
                return [*effects, SendTo(conn, m.Hold(ROLLED_BACK)), Close(conn)]
        effects += self.members.know(now, (hello.replica, self.roster.next_incarnation(hello.replica)))
        if adopted_work is None:
            return effects + self.members.admit(now, conn, hello, epoch=self.phases.epoch)
        self.roster.members[hello.replica].continues_predecessor = True
        effects += self.members.admit(now, conn, replace(hello, claim=adopted_work.ranges), epoch=self.phases.epoch)
        return [*effects, SendTo(conn, adopted_work)]


def _why_gone(hello: m.Hello, *, replaced: bool) -> str:
    """Why a replica cannot go on as its former incarnation, and what it does instead."""
    if replaced:
        why = "another process has come back as this replica"
    elif hello.resumed:
        why = f"incarnation {hello.incarnation}, which is in the checkpoint, has left the job since, or was evicted"
    else:
        why = "it has left, was evicted while it was away, or another process with its id has joined"
    return f"{why}; it joins as the next incarnation"
