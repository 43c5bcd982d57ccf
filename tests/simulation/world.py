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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.machine import Replica
from tests.simulation.checkpoints import SimCheckpoints
from tests.simulation.host import Shard, SimCopy
from tests.simulation.knobs import Knobs
from tests.simulation.loader import Loader

Term = tuple[int, int]
"""A life of a coordinator and its epoch: two that live at once may have the same epoch."""


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")


class World:
    """The clock, the queue, the network; the coordinators' processes, and the replicas' by name."""

    EVENTS = 100_000
    """No history needs more: one that does runs hot."""

    def __init__(self, seed: int, knobs: Knobs, *, trace: list[str] | None = None) -> None:
        self.now = 1000.0
        self.seed = seed
        self.knobs = knobs
        self.random = random.Random(seed)
        self.trace = trace
        self.events = 0
        self.coverage: Counter[str] = Counter()
        self.servers: list[Server] = []
        self.lives = itertools.count(1)
        self.contested = False
        self.processes: Mapping[str, Process] = {}
        self.cuts: dict[frozenset[str], str] = {}
        """Pairs that cannot reach each other; who of the two hears nothing, if the other one does, else ""."""
        self.checkpoints = SimCheckpoints(knobs.save_every)
        self.discarded: dict[tuple[int, m.IncarnationId], set[int]] = {}
        """By fragment and incarnation: inner steps that the replica itself gave up, and said so."""
        self.floor: dict[tuple[int, m.IncarnationId, int], int] = {}
        """By fragment, incarnation and life: the step from which on it counts."""
        self.faults_left = 0
        self.incidents = 0
        """Faults, and what the coordinator has seen of them: each may cost those who wait something."""
        self.jams = 0
        """How often a reducer has begun to hang."""
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self.conns = itertools.count(1)

    @property
    def server(self) -> Server:
        """The coordinator; of two at once the one that was started last."""
        return self.servers[-1]

    def at(self, delay_s: float, action: Callable[..., object], *args: Any) -> None:
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

    def fetch_s(self) -> float:
        return self.between(0.3, 1.5) * self.knobs.fetch_s

    def strike(self, weight: float = 1.0) -> bool:
        """Whether a fault strikes at this point of the protocol."""
        if self.faults_left > 0 and self.chance(weight * self.knobs.fault):
            self.faults_left -= 1
            self.incidents += 1
            return True
        return False

    def discard(self, incarnation_id: m.IncarnationId, fragment: int, start: int, stop: int) -> None:
        """Steps ``start + 1 .. stop`` are given up by the replica itself."""
        self.discarded.setdefault((fragment, incarnation_id), set()).update(range(start + 1, stop + 1))


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
        self.heard_s = world.now
        """When the coordinator heard of it last."""
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
        self.heard_s = self.world.now
        if message is None:
            server.lost(self)
        else:
            server.receive(self, message)

    def _arrive_down(self, message: m.FromCoordinator | None) -> None:
        if self.works:
            self.process.deliver(self, message)

    def cut(self, *, told: bool = True) -> None:
        """It breaks; the replica notices after a while, and so does the coordinator if ``told``."""
        if not self.works:
            return
        self.works = False
        world, silence = self.world, self.world.knobs.dead_after_s
        world.note(self.process.name, f"connection {self.number} breaks")
        after_s = world.between(0, silence) if world.chance(0.5) else world.delay()
        world.at(after_s, lambda: self.process.deliver(self, None))
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

    def _end_there(self) -> None:
        if self.open_there and self.server.life == self.server_life:
            self.server.lost(self)


class Process(ABC):
    """One replica id, and the process that runs under it at present, as the other parts of a world see it."""

    machine: Replica
    shards: list[Shard]
    loader: Loader | None
    leaving: bool
    """It wants to go."""
    gone: bool
    """It has said goodbye."""
    restoring: bool
    """It reads a checkpoint."""
    stepping: bool
    """It has begun to train."""
    follows: Term | None
    """The coordinator that has welcomed it last."""
    installing: set[int]
    """Fragments of which a fetched state is being installed."""
    own_copy: SimCopy | None
    """What it was when its round began; see `tests.simulation.backups`."""
    kept_copies: dict[str, SimCopy]
    """Those of others."""

    def __init__(self, world: World, name: str, *, initial: str, step_s: float) -> None:
        self.world = world
        self.name = name
        self.initial = initial
        self.step_s = self.usual_step_s = self.longest_step_s = step_s
        self.life = 0
        self.alive = False
        self.frozen_until_s = self.hung_until_s = self.offline_until_s = self.jammed_until_s = 0.0
        self.broken = ""
        """How its reductions with others fail, each time: see `SimReduction`."""
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.conn: Conn | None = None
        self.local_steps = 0

    @abstractmethod
    def goodbye(self) -> None:
        """It leaves."""

    @abstractmethod
    def misfortune(self) -> None:
        """Something happens to this process, or to its connection."""

    @abstractmethod
    def deliver(self, conn: Conn, message: m.FromCoordinator | None) -> None:
        """A message, or the end of the connection (None)."""

    @abstractmethod
    def drop(self, conn: Conn | None = None) -> None:
        """Closes the connection, if it is ``conn`` still."""

    @abstractmethod
    def act(self, effects: list[r.ReplicaEffect]) -> None:
        """Does what the machine asks."""

    @abstractmethod
    def check_offered(self, start: int, contribution: m.Contribution) -> None:
        """I3: a contribution of the steps from ``start`` on names their units."""

    @abstractmethod
    def still_s(self) -> float:
        """For how long its training thread has waited for the fate of a contribution, through no fault of its own."""

    @property
    @abstractmethod
    def returning(self) -> m.IncarnationId | None:
        """As what it will be started from a checkpoint; None: it lives, or will be a newcomer."""

    @property
    def incarnation_id(self) -> m.IncarnationId:
        return (self.name, self.machine.incarnation)

    @property
    def frozen(self) -> bool:
        return self.world.now < self.frozen_until_s

    @property
    def motionless(self) -> bool:
        """Whether its reducer does not run."""
        return self.frozen or self.world.now < self.jammed_until_s

    def on_reducer(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Calls ``action`` in this life on the reducer thread, once that does not hang."""
        self.later(delay_s, self._on_reducer, action, args)

    def _on_reducer(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.world.now < self.jammed_until_s:
            self.backlog.append((action, args))
        else:
            action(*args)

    def jam(self, until_s: float) -> None:
        """The reducer thread hangs, while heartbeats go on."""
        self.jammed_until_s = until_s
        self.world.jams += 1
        if until_s < math.inf:
            self.world.at(max(0.0, until_s - self.world.now), self._unjam)

    def _unjam(self) -> None:
        if self.world.now >= self.jammed_until_s:
            backlog, self.backlog = self.backlog, []
            for action, args in backlog:
                self.later(0.0, action, *args)

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Calls ``action`` in this life, once the process is not frozen."""
        self.world.at(delay_s, self._run, self.life, action, args)

    def _run(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life != self.life or not self.alive:
            return
        if self.frozen:
            self.world.at(self.frozen_until_s - self.world.now, self._run, life, action, args)
        else:
            action(*args)

    def hangs(self, action: Callable[[], None]) -> bool:
        """Whether the training thread hangs; it then calls ``action`` when it no longer does."""
        if self.world.now >= self.hung_until_s:
            return False
        self.later(self.hung_until_s - self.world.now, action)
        return True

    def take_over(self, fragment: int) -> bool:
        """Step 6, at a boundary. A new incarnation counts from here, and what was pending is a dead one's: True."""
        dropped = self.shards[fragment].take_over(self.local_steps)
        if dropped:
            self.world.floor[(fragment, self.incarnation_id, self.life)] = self.local_steps
        return dropped


class Server(ABC):
    """A coordinator's process, as the other parts of a world see it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.life = 0
        self.machine: Coordinator | None = None
        self.journal: list[e.Journalled] = []
        self.conns: dict[int, Conn] = {}
        self.heard: dict[int, m.Hello] = {}
        self.silent_since: dict[str, float] = {}
        """When each replica was heard last, of those whose connection has not ended."""
        self.remembers = True
        self.has_journal = self.opened = self.forgot = False
        self.first_hello_s = math.inf
        self.reachable_s = -math.inf
        """Since when replicas can come back to it; minus infinity for the first one of the job."""
        self.schism = False
        """Of the next decision that is sent to several members only one shall hear, and be cut off with it."""

    @property
    def up(self) -> bool:
        return self.machine is not None

    @property
    def term(self) -> Term:
        """Of what it decides now."""
        assert self.machine is not None
        return self.life, self.machine.epoch

    @abstractmethod
    def start(self, *, keep: int | None = None) -> None:
        """A new life, with the first ``keep`` entries of the journal (None: all)."""

    @abstractmethod
    def crash(self) -> None:
        """SIGKILL."""

    @abstractmethod
    def receive(self, conn: Conn, message: m.FromReplica) -> None:
        """A message has come."""

    @abstractmethod
    def lost(self, conn: Conn) -> None:
        """A connection has ended."""

    @abstractmethod
    def retire(self) -> None:
        """It ends for good."""
