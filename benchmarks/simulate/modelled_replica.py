"""A modelled replica: the replica's state machine, and a training thread whose inner steps are counted, not simulated.

At step boundaries it does what ``ftopt.step.outer.step`` does: it proposes when a fragment is due or called in, waits
without a delay, and trains on with one. In between, it computes its progress from the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.simulate.fleet import Fleet, Node
from benchmarks.simulate.many_machines import SharedReplica
from benchmarks.simulate.modelled_reduction import Group, Groups
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.fragment import FragmentState
from ftopt.sync.protocol.replica.identity import Identity

_AGAIN_S = 0.5


@dataclass(slots=True)
class Shard:
    """One fragment as the training thread counts it: the committed state has the steps up to ``base_step``; ``frozen``
    is the last step of the outstanding contribution, made at ``marked_step``; ``offered``: the version for which a
    leaver has offered its steps."""

    base_step: int = 0
    marked_step: int = 0
    frozen: int = -1
    offered: int = -1


class SimReplica(Node):
    """One machine, for as long as it is there."""

    def __init__(self, world: Fleet, name: str, groups: Groups) -> None:
        self.name, self.alive, self.conn = name, False, 0
        self.machine = SharedReplica(
            Identity(
                job="goodput",
                replica=name,
                lines={"model": "m"},
                settings=world.settings,
                initial="same",
                fragments=world.model.fragments,
                address=name,
            ),
            lists=world.lists,
        )
        self.serves = 0
        self._groups = groups
        self._world, self._model, self._tally = world, world.model, world.tally
        self._shards = [Shard() for _ in range(world.model.fragments)]
        self._group: dict[int, Group] = {}
        self._usual = 1 / (world.model.step_s * math.exp(world.random.gauss(0.0, world.model.spread)))
        self._rate = self._usual
        self._steps, self._carry, self._since_s = 0, 0.0, world.now
        self._runs = self._begun = self._counts = False
        self._waits: int | None = None
        self._stood_s = 0.0
        self._turn = 0
        self._mode = ""
        self._until_s = math.inf
        self._dropped_below = 0
        self._there_s: float | None = world.now
        self._capable_s = world.now
        self._capacity = 0.0
        if world.model.slow_every_s < math.inf:
            world.at(world.random.expovariate(1 / world.model.slow_every_s), self._slow_down)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Its process has started, and connects."""
        if self._there_s is None:
            return
        self.alive = True
        self._connect()

    def end(self) -> None:
        """The machine is gone without telling anybody."""
        self.stop_counting()
        if not self.alive:
            return
        self._pause()
        self.alive = False
        for group in self._group.values():
            group.leave(self, dead=True)
        self._tally.ended(self.name, self.machine.incarnation, self._steps, self._dropped_below)

    def stop_counting(self) -> None:
        """From now on the machine could not compute: it is removed, or the trace has ended."""
        if self._there_s is not None:
            self._capacity += (self._world.now - self._capable_s) * self._rate
            self._tally.stayed(self._world.now - self._there_s, self._capacity)
            self._there_s = None

    def _slow_down(self) -> None:
        self._set_rate(self._usual / self._model.slow_factor)
        self._world.at(self._world.random.expovariate(1 / self._model.slow_for_s), self._recover)

    def _recover(self) -> None:
        self._set_rate(self._usual)
        self._world.at(self._world.random.expovariate(1 / self._model.slow_every_s), self._slow_down)

    def _set_rate(self, rate: float) -> None:
        if self._there_s is None:
            return
        self._look()
        self._capacity += (self._world.now - self._capable_s) * self._rate
        self._capable_s, self._rate = self._world.now, rate
        self._plan()

    # ------------------------------------------------------------ the connection

    def _connect(self) -> None:
        if self.alive and not self.conn:
            self.conn = self._world.connect(self)
            self.act(self.machine.connect())

    def receive(self, message: m.FromCoordinator | None) -> None:
        """Takes a message that has arrived; None: the coordinator has closed the connection."""
        if message is not None:
            self.act(self.machine.receive(message))
            return
        self.conn = 0
        self.act(self.machine.disconnect())
        if not self._mode:
            self._world.at(_AGAIN_S, self._connect)

    def _hang_up(self) -> None:
        if self.conn:
            self._world.hang_up(self.conn)
            self.receive(None)

    def heartbeat(self) -> m.Heartbeat:
        state = "training" if self._runs else "waiting" if self._begun else "fetching"
        return m.Heartbeat(state, self._done(), 1 / self._rate)

    # ------------------------------------------------------------ effects of the state machine

    def act(self, effects: list[r.ReplicaEffect]) -> None:
        """Carries out the state machine's effects, and the training thread's reaction."""
        for effect in effects:
            if isinstance(effect, r.Send):
                self._world.send(self.conn, effect.message)
            elif isinstance(effect, r.StartReduce):
                self._reduce(effect)
            elif isinstance(effect, r.StopReduce):
                if group := self._group.pop(effect.fragment, None):
                    group.leave(self)
                    self._world.at(self._model.latency_s, self._stopped, effect.fragment, effect.attempt)
            elif isinstance(effect, r.CommitPrepared):
                self._take(effect.record)
            elif isinstance(effect, r.Fetch):
                self._fetch(effect.position.fragment)
            elif isinstance(effect, r.Reset):
                self._reset()
            elif isinstance(effect, r.Disconnect):
                self._hang_up()
        if self.alive:
            self._poke()

    def _reduce(self, start: r.StartReduce) -> None:
        self._group[start.quorum.fragment] = self._groups.join(self, start)

    def _stopped(self, fragment: int, attempt: int) -> None:
        if self.alive:
            self.act(self.machine.reduce_failed(fragment, attempt, reason="stopped"))

    def _take(self, record: m.Record) -> None:
        """A newer committed state, which decides the fate of the outstanding contribution."""
        shard = self._shards[record.fragment]
        if 0 <= shard.frozen <= self.machine.counted_step(record):
            shard.base_step = shard.frozen
        shard.frozen = -1

    def _reset(self) -> None:
        """This incarnation is gone: pending steps are dropped."""
        self._pause()
        self._tally.dropped += sum(self._steps - x.base_step for x in self._shards) / len(self._shards)
        self._dropped_below = self._steps
        self._shards = [Shard(self._steps, self._steps) for _ in self._shards]
        self._begun = False
        self._hang_up()

    def _fetch(self, fragment: int) -> None:
        wanted = self.machine.fragments[fragment].wanted
        nodes = self._world.nodes
        sources = [nodes[name] for name in wanted.sources if name in nodes and nodes[name].alive] if wanted else []
        source = min(sources, key=lambda x: x.serves, default=None)
        record = source.machine.fragments[fragment].serves() if source is not None else None
        if source is None or record is None:
            self._world.at(self._model.latency_s, self._not_fetched, fragment)
            return
        source.serves += 1
        self._world.at(self._model.fetch_s(source.serves), self._fetched, record, source)

    def _not_fetched(self, fragment: int) -> None:
        if self.alive:
            self.act(self.machine.fetch_failed(fragment))

    def _fetched(self, record: m.Record, source: Node) -> None:
        source.serves -= 1
        if not self.alive:
            return
        if not source.alive:
            self._fetch(record.fragment)
        elif not self.machine.install(record):
            self.act(self.machine.fetch_failed(record.fragment))
        else:
            self._take(record)
            self.act(self.machine.fetched(record))

    # ------------------------------------------------------------ the training thread

    def _done(self) -> int:
        """Inner steps taken so far."""
        if not self._runs:
            return self._steps
        return self._steps + int(self._carry + (self._world.now - self._since_s) * self._rate + 1e-6)

    def _look(self) -> None:
        """Counts the steps up to now."""
        if self._runs:
            total = self._carry + (self._world.now - self._since_s) * self._rate
            whole = int(total + 1e-6)
            self._steps, self._carry = self._steps + whole, max(0.0, total - whole)
        self._since_s = self._world.now

    def _pause(self) -> None:
        """Stops training; the unfinished step is given up."""
        self._look()
        if self._runs:
            self._runs, self._carry, self._stood_s = False, 0.0, self._world.now

    def _go(self) -> None:
        if self._begun and not self._runs:
            self._tally.stood_s += self._world.now - self._stood_s
        if not self._begun:
            for index, shard in enumerate(self._shards):  # fragments take turns
                shard.marked_step = self._steps - index * self._model.sync_every // len(self._shards)
        self._runs, self._begun, self._since_s, self._carry = True, True, self._world.now, 0.0

    def _poke(self) -> None:
        """Reacts to possible changes of the state machine."""
        if self._mode:
            self._give()
        elif not self._begun:
            if self.machine.welcomed and self.machine.may_train:
                self._go()
                self._plan()
        elif self._waits is not None:
            if not self._waiting(self._waits):
                self._waits = None
                self._go()
                self._plan()
        elif any(f.called_in for f in self.machine.fragments):
            self._plan()

    def _waiting(self, fragment: int) -> bool:
        f = self.machine.fragments[fragment]
        return f.outstanding and not f.released

    def _plan(self) -> None:
        """Schedules the next boundary at which there is something to do."""
        if not self._runs:
            return
        self._look()
        at_step = min(shard.marked_step for shard in self._shards) + self._model.sync_every
        if any(f.called_in for f in self.machine.fragments):
            at_step = 0
        left = max(at_step, self._steps + 1) - self._steps - self._carry
        self._turn += 1
        self._world.at(left / self._rate, self._boundary, self._turn)

    def _boundary(self, turn: int) -> None:
        if turn != self._turn or not self.alive or not self._runs:
            return
        self._look()
        for index, (shard, f) in enumerate(zip(self._shards, self.machine.fragments, strict=True)):
            due = self._steps - shard.marked_step >= self._model.sync_every
            if (due or f.called_in) and not f.outstanding:
                self._propose(index, shard, f)
                waits = due and not self._model.delay
            else:
                waits = due
            if waits and self._waiting(index):
                self._pause()
                self._waits = index
                return
        self._plan()

    def _propose(self, index: int, shard: Shard, f: FragmentState) -> None:
        record = f.record
        if record is None:
            return
        steps, shard.marked_step = self._steps - shard.base_step, self._steps
        contribution = m.Contribution(
            fragment=index,
            version=record.version,
            steps=steps,
            last_step=self._steps,
            weight=float(steps),
            overlap_s=self._model.delay / self._rate,
            grace=self._model.adaptive_grace,
        )
        before, shard.frozen = shard.frozen, self._steps
        effects = self.machine.propose(contribution)
        if not f.outstanding:
            shard.frozen = before
        for effect in effects:
            assert isinstance(effect, r.Send)
            self._world.send(self.conn, effect.message)

    # ------------------------------------------------------------ leaving

    def hand_in(self, mode: str, until_s: float) -> None:
        """Leaves after its last whole step, and hands in pending steps as `Model.hand_in` says."""
        if not self.alive or self._mode:
            return
        if not self._begun:
            self.end()
            return
        self._pause()
        self._mode, self._until_s = mode, until_s
        if mode == "leave":
            self.act(self.machine.say(m.Leaving()))
        else:
            self._poke()

    def _give(self) -> None:
        if not self.alive:
            return
        waits = False
        for index, (shard, f) in enumerate(zip(self._shards, self.machine.fragments, strict=True)):
            rests = not f.outstanding and not f.fetching and self._steps > shard.base_step
            if rests and f.record is not None and shard.offered != f.record.version:
                shard.offered = f.record.version
                self._propose(index, shard, f)
            waits |= f.outstanding or f.fetching
        if not waits or self._world.now >= self._until_s:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        if self.conn and self._mode != "leave":
            self._world.send(self.conn, m.Leaving())
        if self.conn and self._mode != "end":
            self._world.send(self.conn, m.Bye())
        self._pause()
        self.alive = False
        self._tally.ended(self.name, self.machine.incarnation, self._steps, self._dropped_below)
