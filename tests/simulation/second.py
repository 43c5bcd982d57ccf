"""A second process of one id: somebody has started it although the first one lives, or before that one has ended."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.replica.resumed import Held
from tests.simulation.world import Conn, Process, World


class SecondProcess(Process):
    """It comes under the id of ``first``, and waits for a while: as a newcomer, which leaves at once when it is let in,
    or from a checkpoint of what ``first`` holds, with its incarnation; let in, it ends."""

    def __init__(self, world: World, first: Process, *, stays_s: float, resumes: bool) -> None:
        super().__init__(world, first.name, initial=first.initial, step_s=first.step_s)
        self.alive, self.life = True, 1
        self.leaving = self.gone = self.restoring = False
        self.stepping, self.follows = False, None
        self.shards, self.loader, self.installing = [], None, set()
        self.own_copy, self.kept_copies = None, {}
        self.machine = Replica(world.knobs.identity(first.name, first.initial, f"{first.name}'"))
        world.note(self.name, "a second process starts")
        world.coverage["a second process of an id"] += 1
        if resumes and (held := _held(first)) is not None:
            world.coverage["a second process resumes"] += 1
            self.machine.resume(held)
        self.later(0.0, self._connect)
        world.at(stays_s, self._end)

    @property
    def returning(self) -> None:
        return None

    def _connect(self) -> None:
        up = [server for server in self.world.servers if server.up]
        if up:
            self.conn = Conn(self.world, self, self.world.random.choice(up))
            self.conn.server.conns[self.conn.number] = self.conn
            self.act(self.machine.connect())
        else:
            self.later(self.world.between(0.05, 0.5), self._connect)

    def _end(self) -> None:
        if self.alive:
            self.world.note(self.name, "the second process ends")
            self.alive = False
            self.drop()

    def still_s(self) -> float:
        return 0.0

    def goodbye(self) -> None:
        assert self.conn is not None
        self.world.note(self.name, "the second process is let in, and leaves")
        self.world.coverage["a second process is let in"] += 1
        self.conn.up(m.Bye())
        self.later(2.0, self._end)

    def misfortune(self) -> None:
        pass

    def deliver(self, conn: Conn, message: m.FromCoordinator | None) -> None:
        if conn is not self.conn or not self.alive:
            return
        if message is None:
            self.conn = None
            self.act(self.machine.disconnect())
            self.later(self.world.between(0.01, 0.5), self._connect)
        elif not self.machine.welcomed:
            self.world.note(self.name, f"second process <- {message}")
            resumed = self.machine.resumed
            self.act(self.machine.receive(message))
            if self.machine.welcomed and resumed:
                self._end()
            elif self.machine.welcomed:
                self.goodbye()

    def drop(self, conn: Conn | None = None) -> None:
        if self.conn is not None:
            self.conn.up(None)
            self.conn = None

    def act(self, effects: list[r.ReplicaEffect]) -> None:
        for effect in effects:
            if isinstance(effect, r.Send) and self.conn is not None:
                self.conn.up(effect.message)
            elif isinstance(effect, r.GiveUp | r.RestoreCheckpoint | m.JobFailed):
                self._end()

    def check_offered(self, start: int, contribution: m.Contribution) -> None:
        pass


def _held(first: Process) -> Held | None:
    """What a checkpoint of it says that was written a moment ago; None while it holds no state."""
    if not first.alive:
        return None
    machine = first.machine
    records = tuple(f.record for f in machine.fragments if f.record is not None and not f.reset)
    if not machine.welcomed or len(records) < len(machine.fragments):
        return None
    return Held(
        first.name,
        machine.incarnation,
        machine.epoch,
        dict(machine.known.gone),
        dict(machine.known.roster),
        records=records,
        samples=first.world.knobs.samples,
        cursor=machine.lease.cursor,
        queue=machine.lease.held,
        forgotten=machine.known.horizon.life,
    )
