"""A virtual fleet: one event queue on one clock, one coordinator's state machine, and a replica's for each machine.

Unlike `tests/simulation`, which looks for broken rules in short histories, it is made for days of thousands of
replicas: single messages draw no random numbers, inner steps are no events, and messages that arrive at the same time
are one event. The state machines, and their inputs, are those of a real job.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.simulate.assumptions import Model
from benchmarks.simulate.fleet import Fleet, Node
from benchmarks.simulate.many_machines import MemberLists
from benchmarks.simulate.modelled_reduction import Groups
from benchmarks.simulate.modelled_replica import SimReplica
from benchmarks.simulate.tally import Tally
from benchmarks.simulate.traces import ADD, Stay, Trace
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e

_LEAVE_S = 40.0
"""Maximum seconds of the last round after the end of the trace, in addition to the grace and the time-out."""

_BATCH = 200
"""Maximum messages that one event delivers: progress is shown between two events."""


class World(Fleet):
    """The clock, the queue, the coordinator and the replicas of one trace."""

    def __init__(self, trace: Trace, model: Model, *, seed: int = 0) -> None:
        self.now = 0.0
        self.events = 0
        self.trace, self.model = trace, model
        self.random = random.Random(seed)
        self.tally = Tally(model.fragments)
        self.conns = itertools.count(1)
        self.lists = MemberLists()
        self.nodes = {}
        self._groups = Groups(self)
        self.server = Server(self)
        first = sum(x.kind == ADD and x.at_s <= 0 for x in trace.changes)
        self.settings = model.settings(max(1, first))
        self._last_s = trace.end_s + _LEAVE_S + 2 * (model.grace_s + model.dead_after_s)
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self._up: tuple[float, list[tuple[int, m.FromReplica]]] = (-1.0, [])
        stays = {(x.node, x.start_s): x for x in trace.stays()}
        for change in trace.changes:
            if change.kind == ADD:
                self.at_time(change.at_s, self._add, stays[change.node, change.at_s])
        self.at_time(trace.end_s, self._end)
        self.at_time(model.heartbeat_s, self._heartbeats)

    def at_time(self, time_s: float, action: Callable[..., object], *args: Any) -> None:
        """Calls ``action(*args)`` at ``time_s``."""
        heapq.heappush(self._queue, (time_s, next(self._sequence), action, args))

    def at(self, delay_s: float, action: Callable[..., object], *args: Any) -> None:
        self.at_time(self.now + delay_s, action, *args)

    def run(self, *, every: int = 200) -> Iterator[float]:
        """Plays the trace; now and then yields the share of it that is done."""
        while self._queue and self._queue[0][0] <= self._last_s:
            self.now, _, action, args = heapq.heappop(self._queue)
            self.events += 1
            action(*args)
            if self.events % every == 0:
                yield min(1.0, self.now / self.trace.end_s)
        for replica in self._there():
            replica.end()

    def _there(self) -> list[SimReplica]:
        return [x for x in self.nodes.values() if isinstance(x, SimReplica)]

    # ------------------------------------------------------------ the network

    def connect(self, node: Node) -> int:
        return self.server.connect(node)

    def hang_up(self, conn: int) -> None:
        self.server.lost(conn)

    def send(self, conn: int, message: m.FromReplica) -> None:
        due_s = self.now + self.model.latency_s
        if self._up[0] != due_s or len(self._up[1]) >= _BATCH:
            self._up = (due_s, [])
            self.at_time(due_s, self._arrive, self._up[1])
        self._up[1].append((conn, message))

    def _arrive(self, messages: list[tuple[int, m.FromReplica]]) -> None:
        if messages is self._up[1]:
            self._up = (-1.0, [])
        for conn, message in messages:
            self.server.receive(conn, message)

    def _heartbeats(self) -> None:
        """Delivers the heartbeats of all replicas at once."""
        if self.now <= self._last_s:
            self.at(self.model.heartbeat_s, self._heartbeats)
        for conn, replica in list(self.server.conns.items()):
            if isinstance(replica, SimReplica) and replica.conn == conn and replica.alive and replica.machine.welcomed:
                self.server.receive(conn, replica.heartbeat())

    # ------------------------------------------------------------ the trace

    def _add(self, stay: Stay) -> None:
        replica = SimReplica(self, stay.node, self._groups)
        self.nodes[stay.node] = replica
        self.at(self.model.start_s, replica.start)
        if stay.removed:
            self.at_time(stay.stop_s, self._remove, replica)
            if stay.told and self.model.hand_in != "none" and self.model.notice_s > 0:
                notice_s = stay.stop_s - min(self.model.notice_s, self.model.hand_in_s)
                self.at_time(max(self.now, notice_s), replica.hand_in, self.model.hand_in, stay.stop_s)

    def _remove(self, replica: SimReplica) -> None:
        replica.end()
        if not self.model.silent:
            self.at(self.model.latency_s, self.hang_up, replica.conn)
        if self.nodes.get(replica.name) is replica:
            del self.nodes[replica.name]

    def _end(self) -> None:
        """The job ends with a round: all replicas hand in their pending steps."""
        for replica in self._there():
            replica.stop_counting()
            replica.hand_in("end", self._last_s)


class Server:
    """The coordinator's process: the state machine, its connections, its timer."""

    def __init__(self, world: World) -> None:
        self._world, self._tally = world, world.tally
        self.machine = Coordinator("goodput")
        self.conns: dict[int, Node] = {}
        self._looks = 0
        self._armed_s = math.inf

    def connect(self, replica: Node) -> int:
        """Opens a new connection."""
        conn = next(self._world.conns)
        self.conns[conn] = replica
        return conn

    def lost(self, conn: int) -> None:
        """Handles that a replica has closed its connection."""
        if self.conns.pop(conn, None) is not None:
            self._act(self.machine.lost(self._world.now, conn))

    def receive(self, conn: int, message: m.FromReplica) -> None:
        """Takes a message that has arrived."""
        if conn in self.conns:
            self._tally.message(self._world.now)
            self._act(self.machine.receive(self._world.now, conn, message))

    def _act(self, effects: e.Effects) -> None:
        sent: list[tuple[int, m.FromCoordinator | None]] = []
        for effect in effects:
            if isinstance(effect, e.SendTo):
                sent.append((effect.conn, effect.message))
            elif isinstance(effect, e.Close):
                sent.append((effect.conn, None))
            elif isinstance(effect, e.Decided):
                self._tally.decided(self._world.now, effect, len(self.machine.roster.connected()))
            elif isinstance(effect, e.Emit):
                self._tally.coordinator_events[effect.event] += 1
        if sent:
            self._tally.message(self._world.now, len(sent))
            self._world.at(self._world.model.latency_s, self._deliver, sent)
        if self.machine.looks != self._looks:
            self._looks = self.machine.looks
            self._arm()

    def _deliver(self, messages: list[tuple[int, m.FromCoordinator | None]]) -> None:
        for conn, message in messages:
            replica = self.conns.get(conn)
            if message is None:
                self.conns.pop(conn, None)
            if replica is not None and replica.alive and replica.conn == conn:
                replica.receive(message)

    def _arm(self) -> None:
        due_s = self.machine.deadline_s()
        if due_s < self._armed_s:
            self._armed_s = due_s
            self._world.at_time(max(self._world.now, due_s), self._tick, due_s)

    def _tick(self, armed_s: float) -> None:
        if armed_s != self._armed_s:
            return
        self._armed_s = math.inf
        if self.machine.deadline_s() <= self._world.now:
            self._act(self.machine.tick(self._world.now))
        self._arm()
