"""A table at which scenarios are played by hand: real machines, and messages that go when the test says so.

Steps are counted by hand; a result is the set of contributions in it. No clock but ``now``, no randomness.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.ledger.ledger import Ledger
from ftopt.sync.protocol.ledger.unit_queue import UnitQueue
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.samples import Samples

SETTINGS: dict[str, float | int | str | None] = {
    "start_replicas": 2, "start_s": 10.0, "grace_s": 2.0, "heartbeat_s": 1.0, "dead_after_s": 3.0,
    "recovery_s": 30.0, "evict_after_s": 600.0,
}  # fmt: skip
M = TypeVar("M")


class Seat:
    """A replica's machine, and its connection."""

    def __init__(
        self,
        table: Table,
        name: str,
        initial: str = "init",
        *,
        arithmetic: str = "",
        address: str = "",
        standby: bool = False,
        model: str = "m",
    ) -> None:
        self.table = table
        self.name = name
        self.machine = Replica(
            Identity(
                job="j",
                replica=name,
                lines={"model": model},
                settings=table.settings,
                initial=initial,
                fragments=table.fragments,
                address=address or name,
                samples=table.samples,
                arithmetic=arithmetic,
            ),
            standby=standby,
        )
        self.machine.lease.wants = table.wants
        self.unit_queue = UnitQueue()
        """The units that it was granted."""
        self.heard_dry: list[bool] = []
        """Whether there was nothing to grant, as it was told."""
        self.conn: int | None = None
        self.inbox: list[m.FromCoordinator] = []
        self.asked: list[r.ReplicaEffect] = []
        self.hangs = False
        """Its reducer hangs: it does not say that it has stopped."""
        self.frozen = False
        """SIGSTOP: no heartbeats either."""
        self.twice: Ranges = ()
        """Units that it has used, and another one, too."""

    @property
    def record(self) -> m.Record:
        """Of fragment 0."""
        return self.held(0)

    def held(self, fragment: int) -> m.Record:
        """The record of the committed state."""
        record = self.machine.fragments[fragment].record
        assert record is not None
        return record

    def connect(self) -> None:
        """Opens a connection; the hello arrives, what is answered is taken in."""
        self.open()
        self.take()

    def open(self) -> None:
        """Opens a connection; the hello arrives."""
        self.table.next_conn += 1
        self.conn = self.table.next_conn
        self.table.seats_by_conn[self.conn] = self
        self.inbox.clear()
        self.do(self.machine.connect())

    def cut(self) -> None:
        """The connection is lost, at both ends."""
        assert self.conn is not None
        conn, self.conn = self.conn, None
        del self.table.seats_by_conn[conn]
        self.inbox.clear()
        self.do(self.machine.disconnect())
        self.table.do(self.table.coordinator.lost(self.table.now, conn))

    def die(self) -> Seat:
        """SIGKILL; returns the process that is started in its place."""
        if self.conn is not None:
            self.cut()
        return Seat(self.table, self.name, self.machine.identity.initial)

    def do(self, effects: list[r.ReplicaEffect]) -> None:
        for effect in effects:
            if isinstance(effect, r.Send):
                self.say(effect.message)
                continue
            if isinstance(effect, m.Grant):
                self.unit_queue.grant(effect.ranges)
                if not effect.ranges:
                    self.heard_dry.append(effect.out_of_units)
                continue
            if isinstance(effect, r.Settled):
                self.twice = union(self.twice, self.unit_queue.settle(effect.done, effect.own))
                continue
            if isinstance(effect, r.Reset):
                self.unit_queue.reset()
            self.asked.append(effect)
            if isinstance(effect, r.StopReduce) and not self.hangs:
                self.stop(effect)

    def say(self, message: m.FromReplica) -> None:
        """Tells the coordinator."""
        if self.conn is not None:
            m.decode(m.encode(message))
            self.table.do(self.table.coordinator.receive(self.table.now, self.conn, message))

    def take(self) -> None:
        """Takes in all that has arrived."""
        while self.inbox:
            message = self.inbox.pop(0)
            self.do(self.machine.receive(m.decode(m.encode(message))))  # type: ignore[arg-type]

    def got(self, kind: type[M]) -> list[M]:
        """Messages of a kind that have arrived and are not taken in yet."""
        return [x for x in self.inbox if isinstance(x, kind)]

    def pop(self, kind: type[M]) -> M:
        """What the machine has asked for: the last effect of a kind."""
        found = [x for x in self.asked if isinstance(x, kind)][-1]
        self.asked.remove(found)
        return found

    def stop(self, order: r.StopReduce) -> None:
        """The reducer ends an attempt that is over, if it was at it."""
        running = [x for x in self.asked if isinstance(x, r.StartReduce) and x.quorum.attempt == order.attempt]
        for start in running:
            self.asked.remove(start)
            self.do(self.machine.reduce_failed(order.fragment, order.attempt, reason="stopped"))

    def pop_fetch(self, fragment: int) -> r.Fetch:
        """The last fetch of a fragment that the machine has asked for."""
        found = [x for x in self.asked if isinstance(x, r.Fetch) and x.position.fragment == fragment][-1]
        self.asked.remove(found)
        return found

    def propose(self, last_step: int, fragment: int = 0, *, now: bool = False) -> m.Contribution:
        """Offers all steps up to ``last_step``; what follows stays in the inboxes."""
        record = self.held(fragment)
        steps = last_step - self.machine.counted_step(record)
        ranges = () if fragment else self.unit_queue.offer()
        contribution = m.Contribution(fragment, record.version, steps, last_step, float(steps), ranges=ranges)
        self.do(self.machine.propose(contribution, now=now))
        return contribution

    def use(self, units: int) -> None:
        """Inner steps use so many units."""
        for _ in range(units):
            unit = self.unit_queue.take()
            assert unit is not None and self.unit_queue.draw(unit)
        self.unit_queue.use()

    def reduce(self, digest: str = "sum", *, live: str = "", peak: float = 0.0) -> r.StartReduce:
        """Takes the quorum in, reduces, and prepares. ``live``, ``peak``: of what it compares beside the result."""
        self.take()
        start = self.pop(r.StartReduce)
        rows = [[self.table.last_step(incarnation_id, start)] for incarnation_id in start.members]
        at = start.quorum
        self.do(self.machine.reduced(at.fragment, at.attempt, digest, rows, live=live, peak=peak))
        return start

    def fetch(self, source: Seat, fragment: int = 0) -> None:
        """Does the fetch that the machine has asked for, from ``source``."""
        self.take()
        self.pop_fetch(fragment)
        record = source.machine.fragments[fragment].serves()
        assert record is not None
        self.end_fetch(record)

    def end_fetch(self, record: m.Record) -> bool:
        """A fetch has brought this state; returns whether the machine lets it be installed."""
        installed = self.machine.install(record)
        self.do(self.machine.fetched(record) if installed else self.machine.fetch_failed(record.fragment))
        self.take()
        return installed


class Table:
    """A coordinator with its journal, and the seats around it."""

    def __init__(self, fragments: int = 1, *, samples: Samples | None = None, wants: int = 0, **settings: Any) -> None:
        self.fragments = fragments
        self.samples = samples
        self.wants = wants
        self.settings = SETTINGS | settings
        self.now = 100.0
        self.life = 1
        self.next_conn = 0
        self.seats_by_conn: dict[int, Seat] = {}
        self.journal: list[e.Journalled] = []
        self.told: list[e.Emit] = []
        self.coordinator = Coordinator("j", now=self.now)

    def start(self, *names: str, kinds: Mapping[str, str] | None = None) -> list[Seat]:
        """A job of these replicas, started, nobody behind. ``kinds``: of their machines."""
        seats = [Seat(self, name, arithmetic=(kinds or {}).get(name, "")) for name in names]
        for seat in seats:
            seat.open()
        for seat in seats:
            seat.take()
            assert all(seat.held(f).version == 0 for f in range(self.fragments))
        return seats

    def do(self, effects: list[e.CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case e.SendTo(conn=conn, message=message):
                    if conn in self.seats_by_conn:
                        self.seats_by_conn[conn].inbox.append(message)
                case e.Close(conn=conn):
                    if seat := self.seats_by_conn.pop(conn, None):
                        seat.take()
                        seat.conn = None
                        seat.do(seat.machine.disconnect())
                case e.Emit():
                    self.told.append(effect)
                case e.Halt():
                    pass
                case _:
                    self.journal.append(effect)

    def tick(self, seconds: float) -> None:
        """Lets time pass; connected seats send heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for seat in list(self.seats_by_conn.values()):
                if seat.machine.welcomed and not seat.frozen:
                    seat.say(m.Heartbeat("training", 1, 0.1))
            self.do(self.coordinator.tick(self.now))

    def wait(self, seconds: float) -> None:
        """Lets time pass in one go: too little for anybody's silence to be noticed."""
        self.now += seconds
        self.do(self.coordinator.tick(self.now))

    def restart(self, *, journal: bool) -> None:
        """The coordinator dies and is started again; all connections are lost."""
        for seat in list(self.seats_by_conn.values()):
            seat.conn = None
            seat.inbox.clear()
            seat.do(seat.machine.disconnect())
        self.seats_by_conn.clear()
        self.life += 1
        saved = e.replay(self.journal) if journal else None
        if not journal:
            self.journal.clear()
        self.coordinator = Coordinator("j", saved=saved, now=self.now, life=self.life, reachable_s=self.now)

    def last_step(self, incarnation_id: m.IncarnationId, start: r.StartReduce) -> int:
        """What that member exchanges in an attempt: the last step of its contribution."""
        attempt = self.coordinator.rounds[start.quorum.fragment].attempt
        assert attempt is not None and attempt.attempt == start.quorum.attempt
        return attempt.contributions[incarnation_id[0]].last_step

    def events(self, name: str) -> list[e.Emit]:
        return [tell for tell in self.told if tell.event == name]

    @property
    def ledger(self) -> Ledger:
        """The coordinator's, of a job that has one."""
        ledger = self.coordinator.assignment.ledger
        assert ledger is not None
        return ledger

    @property
    def version(self) -> int:
        return self.coordinator.rounds[0].at.version
