"""The coordinator's process: the machine, its journal, its connections."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.phases import FORGOTTEN
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e
from tests.simulation.check import Checks
from tests.simulation.knobs import JOB
from tests.simulation.world import Conn, Server, Violation, World

_INCIDENTS = frozenset(("abort", "fork", "gone", "leave", "lost", "mismatch", "recover", "rollback", "start"))
"""Events after which those who wait may wait for something else."""


class CoordinatorProcess(Server):
    """One coordinator of a world, in all its lives."""

    def __init__(self, world: World, checks: Checks) -> None:
        super().__init__(world)
        self.checks = checks
        self._armed_s = math.inf
        self._random = random.Random(world.seed)  # apart: it changes no other draws

    def start(self, *, keep: int | None = None) -> None:
        if self.up or self not in self.world.servers:
            return
        entries = self.journal if keep is None else self.journal[:keep]
        self.remembers = self.remembers and len(entries) == len(self.journal) and not self.world.contested
        if self.life:
            self.world.coverage["restart with journal" if entries else "restart without journal"] += 1
        self.has_journal = bool(entries)
        self.opened = False
        self.forgot = self.forgot or not self.remembers
        if keep is not None:
            self.journal = list(entries)
        self.life = next(self.world.lives)
        self.first_hello_s = math.inf
        self._armed_s = math.inf
        saved = e.replay(entries) if entries else None
        new = self.life == 1 and not self.world.contested
        self.reachable_s = -math.inf if new or (saved and saved.decided) else self.world.now
        self.machine = Coordinator(
            JOB,
            saved=saved,
            now=self.world.now,
            life=100 * self.life,
            reachable_s=self.reachable_s,
            kept_gone=self.world.knobs.kept_gone,
        )
        self.world.note("coord", f"starts with {len(entries)} journal entries")

    def crash(self, *, spare: Conn | None = None) -> None:
        """SIGKILL; what was sent on the connection ``spare`` still arrives."""
        if not self.up:
            return
        self.world.note("coord", "crashes")
        self.machine = None
        for conn in list(self.conns.values()):
            if conn is spare or self.world.chance(0.5):
                conn.down(None)  # what was sent before still arrives
            else:
                conn.cut(told=False)
        self.conns.clear()
        self.heard.clear()
        self.silent_since.clear()

    def _struck(self, row: Sequence[e.CoordinatorEffect]) -> bool:
        """Whether a fault strikes here: it crashes and is started again. ``row``: what its journal has all the same."""
        if not self.world.strike():
            return False
        for effect in row:
            if isinstance(effect, e.Journalled):
                self._journals(effect)
        self.crash()
        keep = self.world.random.choice((None, None, None, 0))
        self.world.at(self.world.between(0.1, 2.0), lambda: self.start(keep=keep))
        return True

    def receive(self, conn: Conn, message: m.FromReplica) -> None:
        if self.machine is None:
            return
        if conn.process is self.world.processes[conn.process.name]:  # else a second process of its id
            self.silent_since[conn.process.name] = self.world.now
        if isinstance(message, m.Hello):
            self.heard[conn.number] = message
            self.first_hello_s = min(self.first_hello_s, self.world.now)
        ledger = self.machine.assignment.ledger
        if isinstance(message, m.Bye) and ledger is not None and ledger.leases.get(conn.process.incarnation_id):
            self.world.coverage["a leaver gives units back"] += 1
        if not isinstance(message, m.Heartbeat):
            self.world.note("coord", f"<- {conn.process.name} {message}")
        if isinstance(message, m.Hello):
            self._look(self.life)
        if self.machine is None:
            return
        look = self.world.knobs.fragments < 2 or self._random.random() < 0.5
        self.act(self.machine.receive(self.world.now, conn.number, message, look=look))
        if self.machine is not None and self.machine.owes_look:
            self.world.at(self._random.uniform(0.0, 0.005), self._look, self.life)

    def _look(self, life: int) -> None:
        if life == self.life and self.machine is not None and self.machine.owes_look:
            self.world.coverage["a look after several messages"] += 1
            self.act(self.machine.look(self.world.now))

    def lost(self, conn: Conn) -> None:
        conn.open_there = False
        if conn.process is self.world.processes[conn.process.name]:
            self.silent_since.pop(conn.process.name, None)
        self.conns.pop(conn.number, None)
        self.heard.pop(conn.number, None)
        self._look(self.life)
        if self.machine is not None:
            self.world.note("coord", f"loses {conn.process.name}'s connection {conn.number}")
            self.act(self.machine.lost(self.world.now, conn.number))

    def retire(self) -> None:
        self.crash()
        self.world.servers.remove(self)

    def _told_of(self, effects: list[e.CoordinatorEffect]) -> list[Conn]:
        """The connections that a decision is sent on."""
        numbers = [x.conn for x in effects if isinstance(x, e.SendTo) and isinstance(x.message, m.Commit)]
        return [self.conns[number] for number in numbers if number in self.conns]

    def _split(self, told: list[Conn], decision: m.FromCoordinator) -> None:
        """One member hears the decision and is cut off; the coordinator and its journal are lost: a fork may follow."""
        world, patience_s = self.world, self.world.knobs.recovery_s
        alone, others = told[0].process, told[1:]
        world.note(alone.name, "alone hears the decision")
        told[0].down(decision)
        for conn in others:
            conn.cut()
        alone.offline_until_s = world.now + world.between(0.5, 3.0) * patience_s
        self.schism = False
        self.crash(spare=told[0])
        world.at(world.between(0.1, 2.0), lambda: self.start(keep=0))

    def act(self, effects: list[e.CoordinatorEffect]) -> None:
        """Does what the machine asks, in order; a crash may come between any two, but for a rollback and the decision
        that goes with it. (The journal's file has all entries of a step or none.)"""
        here = frozenset(self.conns)
        for index, effect in enumerate(effects):
            match effect:
                case e.SendTo(message=m.Commit()) if self.schism and len(told := self._told_of(effects[index:])) > 1:
                    self._split(told, effect.message)
                    return
                case e.SendTo(conn=number, message=message):
                    if conn := self.conns.get(number):
                        if isinstance(message, m.Quorum):
                            self.checks.quorum(conn, message, self.machine)
                        if isinstance(message, m.Grant | m.Inherit) and message.ranges:
                            self.checks.granted(conn, message.ranges, self.machine)
                        if isinstance(message, m.Refuse) and message.reason == FORGOTTEN:
                            self.world.coverage["a forgotten incarnation comes back"] += 1
                        if isinstance(message, m.Welcome):
                            self.checks.let_in(conn, message.incarnation, here)
                        if isinstance(message, m.End):
                            self.checks.end_sent(message, self.machine)
                        conn.down(message)
                        if isinstance(message, m.Commit | m.Quorum | m.Grant) and self.world.strike():
                            conn.cut(told=self.world.chance(0.5))
                case e.Close(conn=number):
                    self.heard.pop(number, None)
                    if conn := self.conns.pop(number, None):
                        conn.open_there = False
                        conn.down(None)
                case e.Emit():
                    self._told(effect)
                case e.Halt(reason=reason):
                    self.world.note("coord", f"halts: {reason}")
                    self.world.coverage["halt"] += 1
                    if len(self.world.servers) > 1:
                        self.retire()
                    else:
                        self.crash()
                        self.world.at(1.0, self.start)
                    return
                case _:
                    rolls_back = index and isinstance(effects[index - 1], e.Rollback)
                    if self._struck([effect] if rolls_back else ()):
                        return
                    self._journals(effect)
                    if self._struck(effects[index + 1 : index + 2] if isinstance(effect, e.Rollback) else ()):
                        return
        self._arm()

    def _journals(self, effect: e.Journalled) -> None:
        self.world.note("coord", f"journals {effect}")
        self.journal.append(effect)
        if isinstance(effect, e.Decided) and any(isinstance(x, m.JobFailed) for x in self.journal):
            raise Violation("LOSS", "a version of a job that has failed")
        if isinstance(effect, m.JobFailed):
            self._failed(effect)
        if isinstance(effect, e.Decided):
            self.checks.decided(effect, self)
        if isinstance(effect, e.Replaced) and effect.by:
            self.checks.replaced(effect, self)
        self.world.coverage["gone incarnations forgotten"] += isinstance(effect, e.Forgotten)
        if isinstance(effect, e.Gone):
            self.checks.gone.add((effect.replica, effect.incarnation))

    def _failed(self, effect: m.JobFailed) -> None:
        """LOSS: one that was lost was neither here nor had it finished."""
        self.world.coverage["a loss ends the job"] += 1
        lost = (effect.replica, effect.incarnation)
        process = self.world.processes.get(effect.replica)
        assert self.machine is not None
        if e.Finished(*lost) in self.journal:
            raise Violation("LOSS", f"{effect.replica} had finished")
        if process is None or not process.alive or process.incarnation_id != lost or process.conn is None:
            return
        conn, term = process.conn, (self.life, self.machine.epoch)
        heard = conn.works and conn.open_there and conn.heard_s > self.world.now - self.world.knobs.dead_after_s
        if process.follows == term and conn.server is self and heard and process.machine.welcomed:
            raise Violation("LOSS", f"{effect.replica} is here: {effect.why}")

    def _told(self, tell: e.Emit) -> None:
        if tell.event not in ("quorum", "call_in"):
            self.world.note("coord", f"event {tell.event} {tell.replica}#{tell.incarnation} {dict(tell.data)}")
        self.world.coverage["called in early" if tell.data.get("early") else tell.event] += 1
        self.world.incidents += tell.event in _INCIDENTS
        if tell.event == "decide" and tell.data["away"]:
            self.world.coverage["decided while a member was away"] += 1
            if not all(self.world.processes[name].alive for name in tell.data["away"]):
                self.world.coverage["decided with a dead member's work"] += 1
        if tell.event in ("recover", "start"):
            self.checks.opened(self, list(self.heard.values()), anew=tell.event == "start")
        if tell.event == "gone" and tell.data["reason"] == "superseded by a newcomer":
            self.checks.superseded((tell.replica, tell.incarnation), self.heard.values())
            self.checks.holder_superseded(self, self.world.processes[tell.replica], tell.incarnation)
        if tell.event == "gone" and "has done nothing" in str(tell.data["reason"]):
            self.checks.given_up(self, self.world.processes[tell.replica], tell.incarnation)

    def _arm(self) -> None:
        if self.machine is None:
            return
        due_s = self.machine.deadline_s()
        if due_s < self._armed_s:
            self._armed_s = due_s
            self.world.at(max(0.0, due_s - self.world.now), self._tick, self.life, due_s)

    def _tick(self, life: int, armed_s: float) -> None:
        if life != self.life or self.machine is None or armed_s != self._armed_s:
            return
        self._armed_s = math.inf
        self.act(self.machine.tick(self.world.now))
        if self.machine is not None and self.machine.deadline_s() <= self.world.now:
            raise Violation("I4", "the coordinator asks for a tick that it has just had")
