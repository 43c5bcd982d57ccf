"""A virtual world: one queue of events on one clock, connections that delay and break, and one coordinator.

Everything random comes from one generator, so that a seed is a history. A connection delivers each direction in order;
several connections are not ordered among each other. When it breaks, what is under way is dropped, and each end learns
of it later, or never (the coordinator then goes by silence).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftopt.simulate.check import Checks, Violation
from ftopt.simulate.saving import SimCheckpoints
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator import effects as e
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.samples import Samples

if TYPE_CHECKING:
    from ftopt.simulate.reduction import SimReduction
    from ftopt.simulate.trainer import Process

JOB = "job"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The constants of one history; seconds are virtual.

    ``fault``: chance of a fault at each protocol point. ``corrupt``: chance that a member's result has a flipped bit.
    ``samples``: of the sample ledger, None without one; ``accumulate``: units of an inner step; ``ahead``: units that
    the loader takes ahead. ``hasty``: chance that a trigger means now at a boundary; above 0, heartbeats bring
    readings, too. ``save_every``: versions from one checkpoint to the next, 0 without any.
    ``replay``: neighbours keep copies, from which a dead one's steps are done again.
    """

    settings: dict[str, float | int | str | None]
    fragments: int = 1
    sync_every: int = 3
    delay_s: float = 0.02
    reduce_s: float = 0.1
    fetch_s: float = 0.3
    fault: float = 0.0
    corrupt: float = 0.0
    nonfinite: float = 0.0
    hasty: float = 0.0
    overlap_steps: int = 0
    grace: float = 0.0
    samples: Samples | None = None
    save_every: int = 0
    accumulate: int = 1
    ahead: int = 0
    replay: bool = False

    @property
    def global_batch(self) -> int:
        """Units of the global batch that replicas share out; 0: each takes steps of its own."""
        samples = self.samples
        return 0 if samples is None or samples.global_batch is None else samples.global_batch // samples.batch_size

    @property
    def dead_after_s(self) -> float:
        return float(self.settings["dead_after_s"] or 0)

    @property
    def recovery_s(self) -> float:
        return float(self.settings["recovery_s"] or 0)


class World:
    """The clock, the queue, the network; the coordinator's process; the replicas' processes by name."""

    EVENTS = 30_000
    """No history needs more: one that does runs hot."""

    def __init__(self, seed: int, knobs: Knobs, *, trace: list[str] | None = None) -> None:
        self.now = 1000.0
        self.knobs = knobs
        self.random = random.Random(seed)
        self.trace = trace
        self.events = 0
        self.coverage: Counter[str] = Counter()
        self.checks = Checks(self)
        self.servers = [Server(self)]
        self.lives = itertools.count(1)
        self.contested = False
        self.processes: dict[str, Process] = {}
        self.cuts: dict[frozenset[str], str] = {}
        """Pairs that cannot reach each other; who of the two hears nothing, if the other one does, else ""."""
        self.checkpoints = SimCheckpoints(knobs.save_every)
        self.groups: dict[tuple[int, int], SimReduction] = {}
        self.faults_left = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self.conns = itertools.count(1)

    @property
    def server(self) -> Server:
        """The coordinator; of two at once the one that was started last."""
        return self.servers[-1]

    def rival(self) -> None:
        """A second coordinator is started on another host, without a journal, while the first one lives."""
        if self.contested or not self.server.up:
            return
        self.contested = True
        self.coverage["two coordinators at once"] += 1
        self.servers.append(Server(self))
        self.server.start()
        for process in self.processes.values():
            if process.alive and process.conn and self.chance(0.6):
                process.conn.cut()

    def mend(self, pair: frozenset[str]) -> None:
        """Two replicas reach each other again."""
        self.cuts.pop(pair, None)

    def at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Calls ``action(*args)`` after ``delay_s``."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._sequence), action, args))

    def run(self, until_s: float, done: Callable[[], bool] | None = None) -> bool:
        """Lets events happen until that time, or until ``done``; returns whether it is."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, action, args = heapq.heappop(self._queue)
            self.events += 1
            if self.events > self.EVENTS:
                raise Violation("I4", f"{self.EVENTS} events: a hot loop")
            action(*args)
            if done is not None and done():
                return True
        self.now = until_s
        return False

    def note(self, who: str, text: object) -> None:
        """A line of the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now - 1000:9.3f}  {who:<6} {text}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def delay(self) -> float:
        """Of one message: mostly short, now and then ten times as long."""
        return self.between(0.2, 1.0) * self.knobs.delay_s * (10 if self.chance(0.05) else 1)

    def strike(self, weight: float = 1.0) -> bool:
        """Whether a fault strikes at this point of the protocol."""
        if self.faults_left > 0 and self.chance(weight * self.knobs.fault):
            self.faults_left -= 1
            return True
        return False


class Conn:
    """One connection of a replica's process to one life of the coordinator."""

    def __init__(self, world: World, process: Process, server: Server) -> None:
        self.world = world
        self.process = process
        self.server = server
        self.number = next(world.conns)
        self.life = process.life
        self.server_life = server.life
        self.works = True
        self.open_there = True
        self.granted: Ranges = ()
        """Units on their way to the replica."""
        self._up_s = self._down_s = 0.0

    def up(self, message: m.FromReplica | None) -> None:
        """To the coordinator; None: the replica has closed."""
        self._up_s = max(self._up_s, self.world.now + self.world.delay())
        self.world.at(self._up_s - self.world.now, self._arrive_up, message)

    def down(self, message: m.FromCoordinator | None) -> None:
        """To the replica; None: the coordinator has closed."""
        if isinstance(message, m.Grant | m.Inherit):
            self.granted = union(self.granted, message.ranges)
        self._down_s = max(self._down_s, self.world.now + self.world.delay())
        self.world.at(self._down_s - self.world.now, self._arrive_down, message)

    def _arrive_up(self, message: m.FromReplica | None) -> None:
        server = self.server
        if not self.works or not self.open_there or server.life != self.server_life:
            return
        if message is None:
            server.lost(self)
        else:
            server.receive(self, message)

    def _arrive_down(self, message: m.FromCoordinator | None) -> None:
        if self.works:
            self.process.deliver(self, message)

    def cut(self, *, told: bool = True) -> None:
        """It breaks; the replica learns it by and by, the coordinator too if ``told``."""
        if not self.works:
            return
        self.works = False
        world, silence = self.world, self.world.knobs.dead_after_s
        world.note(self.process.name, f"connection {self.number} breaks")
        world.at(world.between(0, silence) if world.chance(0.5) else world.delay(), self._end_here)
        if told:
            world.at(world.between(0, silence) if world.chance(0.3) else world.delay(), self._end_there)

    def stall(self, *, up: bool, until_s: float) -> None:
        """One direction carries nothing until then: it comes late, in order, if the connection lasts so long.

        A ping and its answer need both directions: the replica ends the connection after ``dead_after_s``. The
        coordinator misses the heartbeats, or hears of the end.
        """
        world, silence = self.world, self.world.knobs.dead_after_s
        world.note(self.process.name, f"connection {self.number} carries nothing {'up' if up else 'down'}")
        world.coverage["a link that carries one way only"] += 1
        if up:
            self._up_s = max(self._up_s, until_s)
        else:
            self._down_s = max(self._down_s, until_s)
        if until_s > world.now + silence:
            self.process.later(silence, self.process.drop, self)

    def _end_here(self) -> None:
        self.process.deliver(self, None)

    def _end_there(self) -> None:
        if self.open_there and self.server.life == self.server_life:
            self.server.lost(self)


class Server:
    """The coordinator's process: the machine, its journal, its connections."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.life = 0
        self.machine: Coordinator | None = None
        self.journal: list[e.Journalled] = []
        self.conns: dict[int, Conn] = {}
        self.heard: dict[int, m.Hello] = {}
        self.remembers = True
        self.has_journal = False
        self.opened = False
        self.forgot = False
        self.first_hello_s = math.inf
        self.schism = False
        """At the next decision of which several members are told, one alone shall hear of it, and go away with it."""
        self._armed_s = math.inf

    @property
    def up(self) -> bool:
        return self.machine is not None

    def start(self, *, keep: int | None = None) -> None:
        """A new life, with the first ``keep`` entries of the journal (None: all)."""
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
        self.machine = Coordinator(JOB, saved=saved, now=self.world.now, life=100 * self.life)
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

    def _crash_and_return(self) -> None:
        self.crash()
        keep = self.world.random.choice((None, None, None, 0))
        self.world.at(self.world.between(0.1, 2.0), lambda: self.start(keep=keep))

    def connect(self, conn: Conn) -> None:
        self.conns[conn.number] = conn

    def receive(self, conn: Conn, message: m.FromReplica) -> None:
        if self.machine is None:
            return
        if isinstance(message, m.Hello):
            self.heard[conn.number] = message
            self.first_hello_s = min(self.first_hello_s, self.world.now)
        grants = self.machine.grants
        if isinstance(message, m.Bye) and grants is not None and grants.ledger.leases.get(conn.process.incarnation_id):
            self.world.coverage["a leaver gives units back"] += 1
        if not isinstance(message, m.Heartbeat):
            self.world.note("coord", f"<- {conn.process.name} {message}")
        self.act(self.machine.receive(self.world.now, conn.number, message))

    def lost(self, conn: Conn) -> None:
        conn.open_there = False
        self.conns.pop(conn.number, None)
        self.heard.pop(conn.number, None)
        if self.machine is not None:
            self.world.note("coord", f"loses {conn.process.name}'s connection {conn.number}")
            self.act(self.machine.lost(self.world.now, conn.number))

    def retire(self) -> None:
        """It ends for good."""
        self.crash()
        self.world.servers.remove(self)

    def _told_of(self, effects: list[e.CoordinatorEffect]) -> list[Conn]:
        """The connections that are told of a decision."""
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
        """Does what the machine asks, in order; a crash may come between any two."""
        for index, effect in enumerate(effects):
            match effect:
                case e.SendTo(message=m.Commit()) if self.schism and len(told := self._told_of(effects[index:])) > 1:
                    self._split(told, effect.message)
                    return
                case e.SendTo(conn=number, message=message):
                    if conn := self.conns.get(number):
                        if isinstance(message, m.Quorum):
                            self.world.checks.quorum(conn, message, self.machine)
                        if isinstance(message, m.Grant | m.Inherit) and message.ranges:
                            self.world.checks.granted(conn, message.ranges, self.machine)
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
                    if self.world.strike():
                        self._crash_and_return()
                        return
                    self.world.note("coord", f"journals {effect}")
                    self.journal.append(effect)
                    if isinstance(effect, e.Decided):
                        self.world.checks.decided(effect, self.machine)
                    if isinstance(effect, e.Gone):
                        self.world.checks.gone.add((effect.replica, effect.incarnation))
                    if self.world.strike():
                        self._crash_and_return()
                        return
        self._arm()

    def _told(self, tell: e.Emit) -> None:
        if tell.event not in ("quorum", "call_in"):
            self.world.note("coord", f"event {tell.event} {tell.replica}#{tell.incarnation} {dict(tell.data)}")
        self.world.coverage[tell.event] += 1
        if tell.event == "decide" and tell.data["away"]:
            self.world.coverage["decided while a member was away"] += 1
            if not all(self.world.processes[name].alive for name in tell.data["away"]):
                self.world.coverage["decided with a dead member's work"] += 1
        if tell.event in ("recover", "start"):
            self.world.checks.opened(self, list(self.heard.values()))

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
