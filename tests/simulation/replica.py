"""A modelled replica process: the replica's machine, a modelled optimizer, and a training loop that calls it.

It crashes (everything is lost; it comes back as a newcomer), freezes (SIGSTOP: nothing runs, what arrives waits), hangs
(the training thread only, or the reducer's only), is cut off, leaves in good order.
"""

from __future__ import annotations

import random
from dataclasses import replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import subtract
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.machine import Replica
from tests.simulation.backups import SimBackup
from tests.simulation.batches import Shares
from tests.simulation.check import Checks
from tests.simulation.checkpoints import Coming
from tests.simulation.fetcher import SimFetcher
from tests.simulation.host import Content, Payload, Shard
from tests.simulation.loader import Loader
from tests.simulation.patience import Patience
from tests.simulation.reduction import SimReduction
from tests.simulation.saving import put
from tests.simulation.training import InnerSteps
from tests.simulation.world import Conn, Process, Violation, World

Groups = dict[tuple[int, int], SimReduction]
"""Those of all attempts under way, by attempt and the coordinator's life."""


class ReplicaProcess(Process):
    """One replica id, and the process that runs under it at present."""

    def __init__(self, world: World, name: str, *, initial: str, step_s: float, checks: Checks, groups: Groups) -> None:
        super().__init__(world, name, initial=initial, step_s=step_s)
        self.barred = False
        """It is not started again: the job was resumed without it, or is over."""
        self.late = False
        """The data had ended when it came, and all had left."""
        self.failed = False
        """It was told that its job has failed (LOSS)."""
        self.spare = False
        """It is started as a spare, unless it comes from a checkpoint."""
        self.coming: Coming | None = None
        """As what it is started next; None: as a newcomer."""
        self.ends = random.Random(f"{world.seed} {name}")
        self._checks = checks
        self._groups = groups

    @property
    def ended(self) -> bool:
        """Whether it knows that all data are in the committed state."""
        return self.loader.ended if self.loader is not None else self.shares is not None and self.shares.ended

    @property
    def returning(self) -> m.IncarnationId | None:
        return self.coming.held.incarnation_id if self.coming is not None else None

    def still_s(self) -> float:
        return self.patience.still_s()

    # ------------------------------------------------------------ life

    def spawn(self) -> None:
        if self.alive or self.barred:
            return
        knobs = self.world.knobs
        self.life += 1
        self.alive = True
        identity = knobs.identity(self.name, self.initial, self.name)
        self.machine = Replica(identity, standby=self.spare and self.coming is None)
        self.shares = Shares(self) if knobs.global_batch else None
        lends = knobs.samples is not None and self.shares is None
        self.loader = Loader(self.machine, knobs, self.world.coverage, self.act) if lends else None
        self.shards = [Shard(Content(self.initial)) for _ in range(knobs.fragments)]
        self.local_steps = 0
        self.conn = None
        self.leaving = self.stepping = self.gone = self.entered = self.restoring = False
        self.waits_s = 0.0
        self.follows = None
        self.backup, self.fetcher = SimBackup(self), SimFetcher(self, self._checks, self._moved)
        self.training = self.shares or InnerSteps(self, self.backup)
        self.patience = Patience(self)
        self.own_copy, self.kept_copies = None, {}
        self.installing = set()
        self.world.note(self.name, "process starts")
        coming, self.coming = self.coming, None
        if coming is not None:
            self.world.note(self.name, f"goes on from a checkpoint as {coming.held}")
            self.machine.resume(coming.held)
            self._checks.at_end.discard(self.incarnation_id)
            put(self, coming)
        self.later(0.0, self._connect)
        self.later(self.world.between(0, 1), self._heartbeat)

    def crash(self) -> None:
        """SIGKILL."""
        if not self.alive:
            return
        self.world.note(self.name, "is killed")
        self._end()
        if self.conn:
            if self.world.chance(0.5):
                self.conn.up(None)  # what was sent before still arrives
            else:
                self.conn.cut()
            self.conn = None

    def _end(self) -> None:
        self.alive = False
        self.frozen_until_s = self.hung_until_s = self.jammed_until_s = 0.0
        self.backlog.clear()
        for group in list(self._groups.values()):
            group.leave(self.name)

    def leave(self) -> None:
        """SIGTERM: from the next boundary on it wants to go."""
        if self.alive and not self.leaving:
            self.leaving = True
            self.world.note(self.name, "wants to leave")
            self.later(self.world.between(1, 6), self._reach_end if self.waits_s else self.goodbye)
            self.act(self.machine.say(m.Leaving()))

    def finish(self) -> None:
        """It has come to the end of its training (END, LOSS)."""
        self.world.coverage["a replica has finished"] += 1
        self.waits_s = self.ends.choice((0.0, 2.0, 20.0))
        self.act(self.machine.say(m.Finished()))

    def _reach_end(self) -> None:
        """It has handed in what it had, or not in time, and waits for the others (END)."""
        self.world.note(self.name, "is at its end")
        self.act(self.machine.say(m.AtEnd(self.local_steps, self.waits_s)))
        self.later(self.waits_s + 0.5, self.goodbye)

    @property
    def _repeats_bye(self) -> bool:
        return self.machine.said.finished and self.world.knobs.strict

    def goodbye(self) -> None:
        self.world.note(self.name, "leaves")
        if self.gone:
            return
        self.gone = True
        if self._repeats_bye:
            self.act(self.machine.say(m.Bye()))
            self.later(self.world.knobs.recovery_s, self._end)
            return
        if self.conn:
            early = not self.machine.said.finished and bool(self.world.knobs.spares) and self.world.chance(0.7)
            self.conn.up(m.Bye(early=early))
        self.later(2.0, self._end)

    # ------------------------------------------------------------ connection

    def _connect(self) -> None:
        if self.conn is not None:
            return
        if self.gone and (self.machine.over or not self._repeats_bye):
            self._end()
            return
        up = [server for server in self.world.servers if server.up]
        if not up or self.restoring or self.world.now < self.offline_until_s:
            self.later(self.world.between(0.05, 0.5), self._connect)
            return
        server = self.world.random.choice(up) if len(up) > 1 else up[0]
        self.conn = Conn(self.world, self, server)
        server.conns[self.conn.number] = self.conn
        if self.machine.may_restore and self.world.checkpoints.whole:
            self.machine.checkpoint = self.world.checkpoints.whole[-1].position
        self.act(self.machine.connect())

    def deliver(self, conn: Conn, message: m.FromCoordinator | None) -> None:
        self._run(self.life, self._deliver, (conn, message))

    def _deliver(self, conn: Conn, message: m.FromCoordinator | None) -> None:
        if conn is not self.conn:
            return
        if message is None:
            self.conn = None
            self.world.note(self.name, "is disconnected")
            self.kept_copies.clear()
            self.act(self.machine.disconnect())
            self.later(0.0 if self.gone else self.world.between(0.01, 0.5), self._connect)
            return
        self.world.note(self.name, f"<- {message}")
        if isinstance(message, m.Grant | m.Inherit):
            conn.granted = subtract(conn.granted, message.ranges)
        if isinstance(message, m.Quorum | m.Commit | m.Welcome | m.Abort) and self.world.strike():
            self.misfortune()
            if not self.alive or conn is not self.conn:
                return
        self.act(self.machine.receive(message))
        if isinstance(message, m.Welcome) and self.machine.epoch == message.epoch:
            self.follows = conn.server_life, message.epoch

    def drop(self, conn: Conn | None = None) -> None:
        if self.conn and conn in (None, self.conn):
            self.conn.up(None)
            conn, self.conn = self.conn, None
            conn.works = conn.works and conn.open_there
            self.kept_copies.clear()
            self.act(self.machine.disconnect())
            self.later(self.world.between(0.1, 1.0), self._connect)

    def _heartbeat(self) -> None:
        self.later(float(self.world.knobs.settings["heartbeat_s"] or 1), self._heartbeat)
        self.patience.look(waits=self.training.stands_still)
        if self.conn and self.machine.welcomed:
            state = "standby" if self.machine.standby else self.training.state if self.stepping else "fetching"
            plan, left = (self.shares.portion.plan, self.shares.portion.left) if self.shares else (0, 0)
            self.conn.up(m.Heartbeat(state, self.local_steps, self.step_s, self._readings(), plan, left))

    def _readings(self) -> tuple[m.Reading, ...]:
        if not self.world.knobs.hasty:
            return ()
        held = [(x.record, float(self.local_steps - x.base_step)) for x in self.shards]
        return tuple(m.Reading(record.fragment, record.version, (steps,)) for record, steps in held if record)

    def misfortune(self) -> None:
        world = self.world
        what = world.random.choice(("cut", "cut", "cut", "crash", "freeze", "hang", "jam", "offline", "one way"))
        world.note(self.name, f"fault: {what}")
        if what == "cut" and self.conn:
            self.conn.cut(told=world.chance(0.7))
        elif what == "crash":
            self.crash()
            world.at(world.between(0.2, 4.0), self.spawn)
        elif what == "freeze":
            until_s = world.now + world.between(0.5, 3.0 * world.knobs.dead_after_s)
            self.frozen_until_s = max(self.frozen_until_s, until_s)
        elif what == "hang":
            self.hung_until_s = world.now + world.between(0.5, 8.0)
        elif what == "jam":
            self.jam(world.now + world.between(0.5, 30.0))
        elif what == "offline" and self.conn:
            self.offline_until_s = world.now + world.between(0.5, 4.0 * world.knobs.dead_after_s)
            self.conn.cut(told=world.chance(0.5))
        elif what == "one way" and self.conn:
            self.offline_until_s = world.now + world.between(0.5, 4.0 * world.knobs.dead_after_s)
            self.conn.stall(up=world.chance(0.5), until_s=self.offline_until_s)

    # ------------------------------------------------------------ what the machine asks

    def act(self, effects: list[r.ReplicaEffect]) -> None:
        for effect in effects:
            match effect:
                case r.Send(message=message):
                    if self.conn:
                        self.conn.up(message)
                        if isinstance(message, m.Prepared) and self.world.strike(5.0):
                            delay_s = self.world.between(0.0, 2.0 * self.world.knobs.reduce_s)
                            if self.world.chance(0.4):
                                self.later(delay_s, self.crash)
                                self.world.at(delay_s + self.world.between(0.2, 4.0), self.spawn)
                            else:
                                self.world.at(delay_s, self.conn.cut)
                        elif not isinstance(message, m.Hello) and self.world.strike():
                            self.misfortune()
                            if not self.alive:
                                return
                case r.StartReduce():
                    self._reduce(effect)
                case r.StopReduce(fragment=fragment, attempt=attempt):
                    for key, group in self._groups.items():
                        if key[0] == attempt and group.leave(self.name):
                            self.on_reducer(self.world.delay(), self._stopped, fragment, attempt)
                case r.Excluded(fragment=fragment):
                    self.shards[fragment].excluded += 1
                    self.world.coverage["a round without an outlier"] += 1
                case r.CommitPrepared(attempt=attempt, record=record):
                    shard = self.shards[record.fragment]
                    assert shard.results is not None and shard.results[0] == attempt
                    assert shard.record is not None
                    parent, result = shard.record.chain, shard.results[1]
                    shard.advance(record, result, self.machine.counted_step(record))
                    shard.made = shard.attempt
                    self._moved(record, parent)
                case r.Fetch(position=position):
                    self.later(self.world.delay(), self.fetcher.fetch, position.fragment)
                case r.Begin(record=record, reset=reset):
                    shard = self.shards[record.fragment]
                    # What it may have of a former start counts as none of this one's steps.
                    content = shard.content if record.version else replace(shard.content, steps={}, gaps=())
                    shard.advance(record, content, 0)
                    shard.reset = shard.reset or reset
                    self._moved(record, "")
                case r.RestoreCheckpoint():
                    self.restoring, self.entered = True, False
                    self.world.note(self.name, "restores the newest checkpoint")
                    self.drop()
                    self.later(self.world.between(0.1, 2.0), self._restore)
                case m.Grant() if effect.ranges and self.machine.standby:
                    raise Violation("I3", f"{self.name} stands by, and is granted {effect.ranges}")
                case m.Promote():
                    self.world.note(self.name, f"is promoted in the place of {effect.replica}")
                    self.world.coverage["a spare begins to train"] += 1
                case m.End():
                    self._checks.ended(self, effect)
                    self.later(self.world.delay(), self.goodbye)
                case m.Over():
                    self.late = not self.machine.standby
                    self.world.coverage["too late for the job" if self.late else "a spare is sent home"] += 1
                    self.gone = self.barred = True
                    self._end()
                    return
                case m.Grant():
                    assert self.loader is not None
                    self.loader.grant(effect.ranges, out_of_units=effect.out_of_units)
                case r.Settled(done=done, own=own) if self.loader is not None:
                    if self.loader.settle(done, own) and not self._checks.shared:
                        raise Violation("I3", f"{self.name} has used units that are done by others")
                case m.Plan() if self.shares is not None:
                    self.shares.assign(effect.version, effect.plan, effect.units, ended=effect.ended)
                case m.Keep():
                    self.backup.keep(effect)
                case m.Kept():
                    self.backup.kept(effect)
                case m.Inherit():
                    self.backup.inherit(effect)
                case r.Reset(reason=reason):
                    if self.loader is not None:
                        self.loader.reset()
                    if self.shares is not None:
                        self.shares.reset()
                    self.world.note(self.name, f"is reset: {reason}")
                    self.world.coverage["a replica is reset"] += 1
                    self._checks.was_reset(self, reason)
                    self.drop()
                case r.GiveUp(reason=reason) if "the job has ended" in reason:
                    self.world.coverage["too late for the job"] += 1
                    self.late = self.barred = True
                    self._end()
                    return
                case m.JobFailed():
                    self.world.coverage["a replica is told that its job has failed"] += 1
                    self.failed = self.barred = True
                    self._end()
                    return
                case r.GiveUp(reason=reason):
                    raise AssertionError(f"{self.name} is refused for good: {reason}")
                case r.Disconnect():
                    self.drop()
        self._checks.standing(self)
        self.entered |= self.machine.welcomed
        if self.machine.may_train and self.entered and not self.stepping and not self.backup.inheriting:
            self.stepping = True
            self.training.begin()
        self.training.poke()
        self.patience.look(waits=self.training.stands_still)

    def check_offered(self, start: int, contribution: m.Contribution) -> None:
        if self.loader is not None:
            self._checks.offered(self, self.loader, start, contribution)

    def _restore(self) -> None:
        coming = self.world.checkpoints.whole[-1].another_life(self.incarnation_id)
        put(self, coming)
        self.machine.restore(coming.held)
        self.restoring = False
        self.world.coverage["a checkpoint is restored"] += 1

    def _moved(self, record: m.Record, parent: str) -> None:
        self.world.note(self.name, f"holds version {record.version} {record.chain[:6]} of {record.fragment}")
        self._checks.moved(self, record.fragment, parent)

    def _reduce(self, start: r.StartReduce) -> None:
        shard = self.shards[start.quorum.fragment]
        snapshot = shard.snapshot
        assert snapshot is not None, "FREEZE"
        if start.quorum.excludes:
            snapshot = Payload(snapshot.incarnation_id, snapshot.start, m.excluded(snapshot.contribution), ())
        # A newer plan may have left it its share (OWN).
        assert replace(snapshot.contribution, plan=start.contribution.plan) == start.contribution, "FREEZE"
        assert self.conn is not None
        shard.attempt = (start.quorum.attempt, start.members)
        key = (start.quorum.attempt, self.conn.server_life)  # the rendezvous is through the connection
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = SimReduction(self.world, start)
        assert group.members == start.members, "one attempt, two member lists"
        group.join(self, snapshot)

    def _stopped(self, fragment: int, attempt: int) -> None:
        self.act(self.machine.reduce_failed(fragment, attempt, reason="stopped"))
