"""The network thread's part of a replica: the connection to the coordinator, and the machine's effects.

The thread runs the machine: messages, heartbeats, commits, the state served to peers and fetched from them. After each
event it publishes the training thread's view (`ftopt.sync.replica.view`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ftopt.errors import FtoptError, Refused, thread_failed
from ftopt.events import EmitEvent, OnEvent
from ftopt.sync.group import Committed, Contribution, Fingerprint, Held, Host
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges, contains, union
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.replica.connection import Connection
from ftopt.sync.replica.copies import Copies
from ftopt.sync.replica.fetcher import Fetcher
from ftopt.sync.replica.global_batch import GlobalBatch
from ftopt.sync.replica.heartbeats import Heartbeats
from ftopt.sync.replica.job_failed import job_failed
from ftopt.sync.replica.link import Link
from ftopt.sync.replica.log.peers import Peers
from ftopt.sync.replica.log.rounds import RoundsLog
from ftopt.sync.replica.loop import LoopThread
from ftopt.sync.replica.reducer import Reducer
from ftopt.sync.replica.replica_copy import AdoptedWork
from ftopt.sync.replica.shell import committed_of
from ftopt.sync.replica.tally import Emitter
from ftopt.sync.replica.units import Units
from ftopt.sync.replica.view import View
from ftopt.transport.interface import StateTransfer, Transport

_log = logging.getLogger(__name__)
_LOOK_S = 0.02


class Session:
    """The `Shell` of one replica. The training thread writes its public fields, or calls it through `LoopThread`.

    ``connect_s``: seconds after which it gives up if no coordinator has ever answered. ``standby``: it is a spare.
    ``network`` is released at `Client.close`.
    """

    def __init__(
        self,
        replica: str,
        job: str,
        policy: FaultPolicy,
        *,
        link: Link,
        transport: Transport,
        state: StateTransfer,
        network: LoopThread,
        on_event: OnEvent,
        connect_s: float = 10.0,
        standby: bool = False,
    ) -> None:
        self.standby, self.takes_the_place_of = standby, ""
        self.replica, self.policy, self.network, self.on_event = replica, policy, network, on_event
        self.view = View(standby=standby)
        self.emitter = Emitter(replica, on_event, view=self.view, inner_step=self._inner_step, failed=self.fail)
        self.emit: EmitEvent = self.emitter.emit
        self.newest: Callable[[], m.Position | None] = lambda: None
        """Returns fragment 0's position in the newest checkpoint at hand; None: there is none."""
        self.adopted: AdoptedWork | None = None
        self.units: Units | None = None
        self.global_batch: GlobalBatch | None = None
        self.opened = False
        """Whether `machine` and `host` are set."""
        self.machine: Replica
        self.host: Host
        """The optimizer's side. Any thread."""
        self._job = job
        self._opening: asyncio.Task[Any] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._notice = ""
        """The coordinator's last notice."""
        self._stood = 0
        self.peers, self.rounds_log = Peers(replica), RoundsLog(replica)
        self.connection = Connection(
            self,
            link,
            connect_s=connect_s,
            newest=lambda: self.newest(),
            receive=self._receive,
            opened=lambda: self.heartbeats.look(),
            lost=self._lost,
            ended=self._end_membership,
        )
        self.heartbeats = Heartbeats(
            self,
            self.connection,
            self.rounds_log,
            counts=self.emitter.tally.counts,
            pending=self.pending,
            work=self._work,
        )
        self.copies = Copies(self, state)
        self.reducer = Reducer(self, transport)
        self._fetcher = Fetcher(self, state, self.copies.copy_of)

    @property
    def samples(self) -> Samples | None:
        """The samples that the job hands out; None without a ledger."""
        source = self.units or self.global_batch
        return source.samples if source is not None else None

    # ------------------------------------------------------------ any thread

    def cut(self, for_s: float) -> None:
        """Cuts this replica off for ``for_s`` seconds, for fault injection."""
        self.connection.cut(for_s)
        self.reducer.cut()
        self.network.soon(self.connection.hang_up)

    @property
    def cut_off(self) -> bool:
        """Whether a `cut` lasts."""
        return self.connection.cut_off

    def act(self, event: Callable[[Replica], list[e.ReplicaEffect]]) -> None:
        """Gives the machine an event, and performs its effects."""
        self.network.soon(lambda: self.run(event(self.machine)))

    def send(self, message: m.FromReplica) -> None:
        """Sends a message of the rendezvous store. Raises ConnectionError: the coordinator is away."""
        if not self.connection.is_open:
            raise ConnectionError("the coordinator is away")
        self.network.soon(self.connection.send, message)

    # ------------------------------------------------------------ the connection

    async def open(self, host: Host, fingerprint: Fingerprint, resumed: Held | None) -> None:
        """Begins to serve, and starts the tasks that connect and send heartbeats."""
        self.host, self._opening = host, asyncio.current_task()
        address = await self._fetcher.start()
        settings = self.policy.values()
        identity = Identity(
            replaces=os.environ.get("FTOPT_FORMER_ENDED") == "1",
            job=self._job,
            replica=self.replica,
            lines=dict(fingerprint.lines) | {f"policy.{k}": str(v) for k, v in settings.items()},
            settings=settings,
            initial=fingerprint.initial,
            fragments=fingerprint.fragments,
            address=address,
            samples=self.samples,
            arithmetic=fingerprint.arithmetic,
            start_step=fingerprint.start_step,
        )
        self.machine, self.opened = Replica(identity, standby=self.standby), True
        if resumed is not None:
            self.machine.resume(resumed)
        self._want()
        self._tasks = [asyncio.create_task(self.connection.keep()), asyncio.create_task(self.heartbeats.beat())]
        for task in self._tasks:
            self.watch(task)

    def _lost(self) -> None:
        self.copies.lost()
        self.run(self.machine.disconnect())
        self.reducer.fail_store()

    def _work(self) -> tuple[float | None, int, int]:
        """Since when the loop waits for samples; the global batch's plan, and the units left of it."""
        since_s = self.units.waits_since_s if self.units is not None else None
        return since_s, *(self.global_batch.standing() if self.global_batch is not None else (0, 0))

    def _inner_step(self) -> int:
        host: Host | None = getattr(self, "host", None)
        return host.standing()[0] if host is not None else self._stood

    def pending(self) -> int:
        """Inner steps that no committed state contains."""
        record = self.machine.fragments[0].record
        return max(0, self.host.standing()[0] - (record.inner_step if record is not None else 0))

    async def restored(self, held: Held) -> None:
        """Connects again, since the host has restored a checkpoint."""
        if self.units is not None:
            self.units.put_back(held.used, held.queue)
        self.machine.restore(held)
        self.view.restore(done=True)

    async def bye(self, early: bool, reason: str) -> bool:
        """Sends the last counts, then says goodbye, and waits for the coordinator to hang up; returns whether it may
        have heard. With ``on_loss: fail``, a replica that has finished waits for a coordinator that is away (LOSS)."""
        self.emitter.tally.leaving = True
        self.heartbeats.send()
        if self.machine.said.finished and self.policy.on_loss == "fail":
            give_up = time.monotonic() + self.policy.derived.recovery_s
            self.run(self.machine.say(m.Bye()))
            while not self.machine.over and self.view.failure is None and time.monotonic() < give_up:
                await asyncio.sleep(_LOOK_S)
            self.connection.said_bye = True
            return self.machine.over
        await self.connection.say_bye(m.Bye(early, reason))
        return True

    async def end(self) -> None:
        """Ends connections and tasks, also those that `open` is still about to start: its caller may be gone."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.connection.end()
        await self.copies.stop()
        await self._fetcher.stop()

    def let_go(self) -> None:
        """After `end`: drops references to the optimizer, since this object is in reference cycles and stays until
        Python collects them."""
        if self.opened:
            self._stood = self.host.standing()[0]  # the event of a last checkpoint may follow
            del self.host
        self.newest, self.adopted = lambda: None, None

    async def committed(self) -> list[Committed]:
        """The machine's records, as the host sees them."""
        return [committed_of(self.machine, f.record) for f in self.machine.fragments if f.record is not None]

    def watch(self, task: asyncio.Task[None]) -> None:
        """Ends the membership if the task fails."""
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail_network(error)

    def fail_network(self, error: BaseException) -> None:
        """Ends the membership, since the network thread has failed; see `fail`."""
        self.fail("the network thread", error)

    def fail(self, where: str, error: BaseException) -> None:
        news = self.view.failure is None and not self.view.closed
        self._end_membership(thread_failed(self.replica, where, error))
        if news:
            with contextlib.suppress(Exception):  # of the user's log handler
                _log.error("replica %s: %s failed", self.replica, where, exc_info=error)

    def _end_membership(self, error: FtoptError) -> None:
        self.view.fail(error)
        if self.global_batch is not None:
            self.global_batch.poke()

    # ------------------------------------------------------------ the machine

    def _receive(self, message: object) -> None:
        if isinstance(message, m.StoreValue):
            self.reducer.store_value(message.key, base64.b64decode(message.value))
        elif isinstance(message, m.FromCoordinator):
            if isinstance(message, m.RosterUpdate):
                self.copies.gone(message.gone)
                self.peers.gone(message.gone)
            self.run(self.machine.receive(message))

    def accept(self, contribution: Contribution, now: bool) -> None:
        """Takes a proposal of the training thread."""
        if self._fetcher.defers(contribution, now):
            return
        self._want()
        self.run(self.machine.propose(contribution, now=now), arrived=contribution.fragment)

    def _want(self) -> None:
        """Sets how many units this replica wants to hold, from what its rounds have used."""
        if self.units is not None:
            self.machine.lease.wants = self.units.wants

    def run(self, effects: list[e.ReplicaEffect], *, arrived: int | None = None) -> None:
        """Performs the machine's effects. ``arrived``: as in `View.publish`."""
        for effect in effects:
            self._perform(effect)
        self._publish(arrived=arrived)

    def _perform(self, effect: e.ReplicaEffect) -> None:
        match effect:
            case e.Send(message=message):
                self.connection.send(message)
            case e.StartReduce(quorum=q):
                record = self.machine.fragments[q.fragment].record
                self.reducer.begin(effect, record.inner_step if record is not None else 0)
            case e.StopReduce(fragment=fragment, attempt=attempt):
                self.reducer.abort(attempt)
                self.host.discard(fragment)
                self.view.stop(fragment)
            case e.Excluded(fragment=fragment, version=version, reason=reason, void=void):
                self.emit("outlier", fragment=fragment, version=version, data={"reason": reason})
                self.rounds_log.weighs_nothing(version, reason)
                self.host.exclude(fragment, reason, void=void)
            case e.CommitPrepared(attempt=attempt, record=record):
                members = self.machine.fragments[record.fragment].members
                peers = self.peers.committed(record.fragment, record.version, members)
                started = self.reducer.started(attempt)
                self.emit("commit", fragment=record.fragment, version=record.version, attempt=attempt, data=peers)
                self.host.commit(started, committed_of(self.machine, record))
            case e.Begin(record=record, reset=reset, again=again):
                if reset or again:  # else the host begins with its own state anyway
                    self.host.begin(committed_of(self.machine, record), reset=reset)
            case e.RestoreCheckpoint():
                self.connection.restores = True
                self.view.restore(done=False)
                self.connection.hang_up()
            case e.Fetch():
                self._fetcher.begin(effect)
            case m.Grant() if self.units is not None:
                self.units.grant(effect.ranges, out_of_units=effect.out_of_units)
            case e.Settled(done=done, own=own) if self.units is not None:
                if twice := self.units.settle(done, own):
                    self.emit("used_twice", fragment=0, data={"ranges": twice})
                self._tell_end_of_data(self.units)
            case m.Plan() if self.global_batch is not None:
                self.global_batch.assign(effect)
                self._tell_end_of_data(self.global_batch)
            case m.Speed():
                self._tell_speed(effect)
            case m.Keep():
                self.copies.keep(effect)
            case m.Kept():
                self.copies.kept(effect)
            case m.Inherit():
                self.copies.adopt(effect)
            case m.Promote(replica=replica):
                self.takes_the_place_of = replica or "one that was lost"
                self.emit("promoted", data={"in_place_of": replica})
            case m.Over(reason=reason):
                self.connection.said_bye = True
                self.emit("over", data={"reason": reason})
                self.view.is_over(reason)
            case m.JobStopped():
                self.view.stopped = effect
                self.rounds_log.stopped(effect)
            case m.End():
                self.view.has_ended(effect)
            case e.Reset(reason=reason):
                self.adopted = None
                if self.units is not None:
                    self.units.reset()
                if self.global_batch is not None:
                    self.global_batch.reset()
                self.emit("reset", data={"reason": reason})
                self.connection.hang_up()
            case e.GiveUp(reason=reason):
                self.connection.said_bye = True  # it has no more to say
                self._end_membership(Refused(reason))
            case m.JobFailed():
                self._end_membership(job_failed(self._job, effect, self.pending()))
            case e.Disconnect(reason=reason):
                self.emit("epoch", data={"reason": reason})
                self.connection.hang_up()
            case e.Notice(text=text) if text != self._notice:
                self._notice = text
                if not self.machine.welcomed:
                    self.connection.kept_out = text
                self.emit("hold", data={"text": text})

    def _tell_speed(self, speed: m.Speed) -> None:
        data = asdict(speed)
        if data.pop("slow"):
            self.emit("slow", data=data)
        else:
            self.emit("up_to_speed", data=data)
        self.rounds_log.speed(speed, time.monotonic())

    def _tell_end_of_data(self, share: Units | GlobalBatch) -> None:
        record = self.machine.fragments[0].record
        if share.ended and record is not None:
            self.rounds_log.data_ended(share.samples.epochs, record.inner_step)

    def _publish(self, *, arrived: int | None = None) -> None:
        self.view.publish(self.machine, let_in=not self.copies.adopting, arrived=arrived)
        if self.global_batch is not None:
            self.global_batch.poke()

    def adopt(self, ranges: Ranges, adopted: AdoptedWork | None) -> None:
        """Adopts a predecessor's units, in this order, and its work."""
        if not contains(self.machine.lease.held, union(ranges)):
            adopted, ranges = None, ()  # evicted meanwhile, or connected again
        if self.units is not None:
            self.units.grant_first(ranges)
        self.adopted = adopted
        self._publish()
