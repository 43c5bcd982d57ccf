"""The replica's end of the outer-sync layer: threads, sockets and time around the replica machine.

Three threads meet here. The *training thread* calls the methods of `ReplicaGroup`. The *network thread* runs the
machine: messages, heartbeats, commits, the state served to peers and fetched from them. The *reducer thread* builds
process groups and reduces; a hung trainer blocks neither of the others. The training thread sees the machine through a
few flags that the network thread mirrors after each event.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ftopt.codecs import codec_named
from ftopt.errors import FtoptError, Refused, Unreachable, UserError
from ftopt.events import Event, OnEvent, wants_steps
from ftopt.sync.group import Committed, Contribution, Fingerprint, Foreign, Held, Host
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges, contains, union
from ftopt.sync.protocol.limits import MAX_READING, MAX_STEP_S, MAX_WANTS, MAX_WORD
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.protocol.settings import Sync
from ftopt.sync.replica.backup import Backup
from ftopt.sync.replica.fetcher import Fetcher
from ftopt.sync.replica.global_batch import GlobalBatch
from ftopt.sync.replica.inheritance import Inherited, ReplicaCopy
from ftopt.sync.replica.link import Channel, Link
from ftopt.sync.replica.loop import LoopThread
from ftopt.sync.replica.reducer import Reducer
from ftopt.sync.replica.units import Units
from ftopt.transport.interface import StateTransfer, Transport

_log = logging.getLogger(__name__)


class Client:
    """A `ReplicaGroup` over a link to a coordinator.

    Args:
        replica: this replica's id, unique in the job.
        job: the job's name.
        sync: the job's settings.
        link: how to reach the coordinator.
        transport: makes the process groups.
        state: serves and fetches the committed state.
        network: the loop to live on; released at `close`.
        on_event: is told what happens.
        connect_s: seconds after which `start` gives up when nobody answers. Default 10.
    """

    def __init__(
        self,
        replica: str,
        job: str,
        sync: Sync,
        *,
        link: Link,
        transport: Transport,
        state: StateTransfer,
        network: LoopThread,
        on_event: OnEvent,
        connect_s: float = 10.0,
    ) -> None:
        self.replica = replica
        self.sync = sync
        self.codec = codec_named(sync.codec_name)
        self.tells_steps = wants_steps(on_event)
        self.units: Units | None = None
        self.global_batch: GlobalBatch | None = None
        self._accumulate = 1
        self._job = job
        self._link = link
        self._network = network
        self._on_event = on_event
        self._connect_s = connect_s
        self._machine: Replica | None = None
        self._host: Host | None = None
        self._changed = threading.Condition()
        self._failure: FtoptError | None = None
        self._incarnation = 0
        self._resumed: Held | None = None
        self._newest: Callable[[], m.Position | None] = lambda: None
        self._restore: Callable[[], Held] | None = None
        self._restoring = False
        self._welcomed = False
        self._ready = self._may_train = False
        self._closed = False
        self._state = "starting"
        self._waiting = False
        self._leaving = False
        self._outstanding: list[bool] = []
        self._released: list[bool] = []
        self._called_in: list[bool] = []
        self._now: list[bool] = []
        self._means: list[m.Means | None] = []
        self._readings: dict[int, m.Reading] = {}
        self._offered: list[int] = []
        self._failed: list[int] = []
        # Network thread only.
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._notice = ""
        self._said_bye = False
        self._cut_until_s = 0.0
        self._reducer = Reducer(self, transport)
        self._fetcher = Fetcher(self, state, timeout_s=sync.dead_after_s)
        self.backup = Backup(self, state, timeout_s=sync.dead_after_s)
        self._inherited: Inherited | None = None

    # ------------------------------------------------------------ training thread

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def keep_ledger(self, samples: Samples, *, accumulate: int = 1) -> Units:
        if self._is_free_for(samples):
            self.units = Units(samples)
            self._accumulate = accumulate
        assert self.units is not None
        return self.units

    def keep_global_batch(self, samples: Samples) -> GlobalBatch:
        if self._is_free_for(samples):
            self.global_batch = GlobalBatch(samples)
        assert self.global_batch is not None
        return self.global_batch

    def _is_free_for(self, samples: Samples) -> bool:
        """Whether nothing is handed out yet; raises UserError if something else is."""
        handed_out = self.samples
        if handed_out is None and self._host is not None:
            raise UserError("this replica has joined its job already; make its data loader before `with optimizer:`")
        if handed_out not in (None, samples):
            raise UserError(
                f"the job hands out {handed_out}, and this loader asks for {samples}; a group has one data "
                "set to train on: give a loader for evaluation no group"
            )
        return handed_out is None

    @property
    def samples(self) -> Samples | None:
        """What the job hands out, None without a ledger."""
        source = self.units or self.global_batch
        return source.samples if source is not None else None

    def start(self, host: Host, fingerprint: Fingerprint) -> list[Committed]:
        self._host = host
        self._network.acquire()
        count = fingerprint.fragments
        self._outstanding, self._released, self._called_in = [False] * count, [False] * count, [False] * count
        self._offered, self._failed = [0] * count, [0] * count
        self._now, self._means = [False] * count, [None] * count
        if self.units is not None:
            steps = fingerprint.period
            self.units.begin(self._run_short, round_units=steps * self._accumulate if steps else None)
        if self.global_batch is not None:
            self.global_batch.begin(self._check)
        self._reducer.start()
        self._network.submit(self._open(fingerprint)).result()
        try:
            while self._has_to_restore():
                assert self._restore is not None
                self._network.submit(self._restored(self._restore())).result()
        except BaseException:
            self.close()
            raise
        return self._network.submit(self._committed()).result()

    def _has_to_restore(self) -> bool:
        """Waits until this replica holds a state (False) or has to restore one; raises what is wrong."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_train or self._restoring or self._failure is not None)
            self._check()
            return self._restoring

    def held(self) -> Held:
        machine, units = self.machine, self.units
        held = Held(self.replica, self._incarnation, machine.epoch, dict(machine.gone), samples=self.samples)
        if units is None:
            return held
        used, queue = units.kept()
        return replace(held, cursor=machine.lease.cursor, used=used, queue=queue)

    def resume(self, held: Held) -> None:
        assert self._machine is None, "resume() after start()"
        if held.samples != self.samples:
            raise Foreign(f"its job handed out {held.samples or 'no samples'}, and this one {self.samples or 'none'}")
        if self.units is not None:
            self.units.put_back(held.used, held.queue)
        self._resumed = held

    def fall_back(self, newest: Callable[[], m.Position | None], restore: Callable[[], Held]) -> None:
        self._newest, self._restore = newest, restore

    def offer_copy(self, versions: tuple[int, ...], text: str, tensors: Mapping[str, Tensor]) -> None:
        used, queue = self.units.kept() if self.units is not None else ((), ())
        copy = ReplicaCopy((self.replica, self._incarnation), versions, used, queue, text, tensors)
        self._network.soon(self.backup.offer, copy)

    def inherited(self) -> Inherited | None:
        inherited, self._inherited = self._inherited, None
        return inherited

    def propose(self, contribution: Contribution, *, now: bool = False) -> None:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._offered[contribution.fragment] += 1
            self._now[contribution.fragment] = now
        self._network.soon(self.accept, contribution)

    def wait(self, fragment: int, *, timeout_s: float | None = None) -> bool:
        self._waiting = True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self._changed:
                failed = self._failed[fragment]
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if not self.outstanding(fragment) or self._closed:
                        return True
                    if self._released[fragment] and not self._offered[fragment]:
                        return False
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and (left_s <= 0 or self._failed[fragment] != failed):
                        return False
                    self._changed.wait(left_s)
        finally:
            self._waiting = False

    def catch_up(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ready or self._closed, self.sync.dead_after_s)

    def outstanding(self, fragment: int) -> bool:
        return bool(self._offered[fragment]) or self._outstanding[fragment]

    def called_in(self, fragment: int) -> bool:
        return self._called_in[fragment]

    def share(self, reading: m.Reading) -> None:
        if all(abs(value) <= MAX_READING for value in reading.values):  # NaN neither
            self._readings[reading.fragment] = reading

    def means(self, fragment: int) -> m.Means | None:
        return self._means[fragment]

    def report(self, state: str) -> None:
        self._state = state
        if state == "leaving" and not self._leaving:
            self._leaving = True
            self._network.soon(self._leave)

    def leave(self, *, timeout_s: float) -> None:
        if self._machine is None or self._closed or self._failure is not None:
            return
        self.report("leaving")
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while any(self.outstanding(f) for f in range(len(self._outstanding))) and self._failure is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._closed:
                    break
                self._changed.wait(left_s)
        try:
            self._network.submit(self._bye()).result(timeout=3.0)
        except TimeoutError:
            _log.warning("replica %s: the coordinator did not hear the goodbye", self.replica)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self.units is not None:
            self.units.close()
        if self.global_batch is not None:
            self.global_batch.close()
        if self._host is None:
            return
        self._reducer.stop()
        try:
            self._network.submit(self._end()).result(timeout=10.0)
        finally:
            self._network.release()

    def emit(
        self,
        event: str,
        *,
        fragment: int | None = None,
        version: int | None = None,
        attempt: int | None = None,
        inner_step: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        if inner_step is None:
            inner_step = self._host.standing()[0] if self._host is not None else 0
        self._on_event(
            Event(event, self.replica, self._incarnation, fragment, version, attempt, inner_step, data or {})
        )

    def cut(self, for_s: float) -> None:
        """A partition, for fault injection: nothing reaches anybody for ``for_s`` seconds. Any thread."""
        self._cut_until_s = time.monotonic() + for_s
        self._reducer.cut()
        self._network.soon(self._hang_up)

    @property
    def cut_off(self) -> bool:
        """Whether a `cut` lasts."""
        return time.monotonic() < self._cut_until_s

    # ------------------------------------------------------------ network thread: life

    async def _open(self, fingerprint: Fingerprint) -> None:
        address = await self._fetcher.start()
        settings = self.sync.values()
        lines = dict(fingerprint.lines) | {f"sync.{k}": str(v) for k, v in settings.items()}
        identity = Identity(
            job=self._job,
            replica=self.replica,
            lines=lines,
            settings=settings,
            initial=fingerprint.initial,
            fragments=fingerprint.fragments,
            address=address,
            samples=self.samples,
        )
        self._machine = Replica(identity)
        if self._resumed is not None:
            self._machine.resume(self._resumed)
        self._want()
        self._tasks = [asyncio.create_task(self._session()), asyncio.create_task(self._beat())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def _session(self) -> None:
        """Connects, listens until the connection is lost, connects again."""
        machine = self.machine
        give_up = time.monotonic() + self._connect_s
        ever, delay_s, complaint = False, 0.02, ""
        while True:
            try:
                if self.cut_off or self._restoring:
                    raise ConnectionError("cut off" if self.cut_off else "a checkpoint is being restored")
                if not machine.complete:
                    machine.checkpoint = await asyncio.to_thread(self._newest)
                self._channel = channel = await self._link.open(self._receive)
            except (OSError, Refused) as error:
                if isinstance(error, Refused) and not ever:
                    self._fail(error)
                    return
                # Later whoever answers so is not the coordinator that let us in: the trainer goes on alone meanwhile.
                if isinstance(error, Refused) and str(error) != complaint:
                    complaint = str(error)
                    _log.warning("replica %s: %s", self.replica, complaint)
                if not ever and time.monotonic() > give_up:
                    self._fail(
                        Unreachable(
                            f"no coordinator answers within {self._connect_s:g} s ({error}); start one with "
                            "`ftopt coordinator`, or check the address and the network between"
                        )
                    )
                    return
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(0.5, delay_s * 2)
                continue
            ever, complaint = True, ""
            self.run(machine.connect())
            await channel.closed()
            delay_s = 0.02 if machine.welcomed else min(0.5, delay_s * 2)
            self._channel = None
            self.backup.lost()
            self.run(machine.disconnect())
            self._reducer.fail_store()
            if self._said_bye:
                return
            self.emit("disconnected")
            await asyncio.sleep(delay_s)

    async def _beat(self) -> None:
        while True:
            machine, channel = self._machine, self._channel
            if channel is not None and machine is not None and machine.welcomed:
                state, (inner_step, step_s) = self._state, self.host.standing()
                if self._waiting and state == "training":
                    state = "waiting"
                progress = m.Heartbeat(state[:MAX_WORD], inner_step, min(step_s, MAX_STEP_S), self._current_readings())
                channel.send(m.encode(progress))
            await asyncio.sleep(self.sync.derived.heartbeat_s)

    def _current_readings(self) -> tuple[m.Reading, ...]:
        records = {record.fragment: record for record in self._records()}
        readings = list(self._readings.values())
        return tuple(x for x in readings if x.fragment in records and x.version == records[x.fragment].version)

    async def _restored(self, held: Held) -> None:
        if self.units is not None:
            self.units.put_back(held.used, held.queue)
        self.machine.restore(held)
        self._restoring = False

    async def _bye(self) -> None:
        self._said_bye = True
        if (channel := self._channel) is not None:
            channel.send(m.encode(m.Bye()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(channel.closed(), timeout=2.0)  # the coordinator hangs up when it has heard it

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        await self._link.end()
        await self.backup.stop()
        await self._fetcher.stop()

    async def _committed(self) -> list[Committed]:
        return [self.committed(record) for record in self._records()]

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("replica %s: the network thread failed", self.replica, exc_info=error)
            self._fail(FtoptError(f"the outer-sync layer of {self.replica} failed: {error!r}; please report this"))

    def _fail(self, error: FtoptError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        if self.global_batch is not None:
            self.global_batch.poke()

    def _check(self) -> None:
        """Raises what `wait` raises."""
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------ network thread: the machine

    def _receive(self, text: str) -> None:
        if self.cut_off:
            return
        machine = self.machine
        message = m.decode(text)
        if isinstance(message, m.StoreValue):
            self._reducer.store_value(message.key, base64.b64decode(message.value))
        elif isinstance(message, m.FromCoordinator):
            if isinstance(message, m.RosterUpdate):
                self.backup.gone(message.gone)
            self.run(machine.receive(message))

    def accept(self, contribution: Contribution) -> None:
        """A proposal of the training thread reaches the machine. Network thread."""
        machine = self.machine
        if self._fetcher.defers(contribution):
            return
        self._want()
        effects = machine.propose(contribution, now=self._now[contribution.fragment])
        with self._changed:  # at once: between the two it would look decided to the training thread
            self._offered[contribution.fragment] -= 1
            self._mirror()
        self.run(effects)

    def _want(self) -> None:
        """How many units it wants to hold: by what its rounds have taken."""
        if self.units is not None:
            self.machine.lease.wants = min(self.units.wants, MAX_WANTS)

    def _run_short(self) -> None:
        """Units run short. Any thread."""
        self._network.soon(lambda: self.run(self.machine.ask()))

    def _leave(self) -> None:
        if self._machine is not None:
            self.run(self._machine.leave())

    def run(self, effects: list[e.ReplicaEffect]) -> None:
        """Performs what the machine asks for. Network thread."""
        for effect in effects:
            self._perform(effect)
        self._mirror()

    def _perform(self, effect: e.ReplicaEffect) -> None:
        match effect:
            case e.Send(message=message):
                self._send(message)
            case e.StartReduce(quorum=q):
                if q.outlier:
                    data = {"reason": q.outlier}
                    self.emit("outlier", fragment=q.fragment, version=q.version, attempt=q.attempt, data=data)
                record = self.machine.fragments[q.fragment].record
                self._reducer.begin(effect, record.inner_step if record is not None else 0)
            case e.StopReduce(fragment=fragment, attempt=attempt):
                self._reducer.abort(attempt)
                self.host.discard(fragment)
                with self._changed:
                    self._failed[fragment] += 1
            case e.CommitPrepared(attempt=attempt, record=record):
                started = self._reducer.started(attempt)
                self.emit("commit", fragment=record.fragment, version=record.version, attempt=attempt)
                self.host.commit(started, self.committed(record))
            case e.Begin(record=record, reset=reset):
                if reset:  # otherwise the host begins with its own state anyway
                    digest, tensors = self.host.state(record.fragment)
                    self.host.install(self.committed(record), digest, tensors, reset=True)
            case e.RestoreCheckpoint():
                with self._changed:
                    self._restoring, self._welcomed = True, False
                self._hang_up()
            case e.Fetch():
                self._fetcher.begin(effect, self._on_task_end)
            case e.Granted(ranges=ranges, out_of_units=out_of_units) if self.units is not None:
                self.units.grant(ranges, out_of_units=out_of_units)
            case e.Settled(done=done, own=own) if self.units is not None:
                if twice := self.units.settle(done, own):
                    self.emit("used_twice", fragment=0, data={"ranges": twice})
            case e.Planned(version=version, plan=plan, units=units, ended=ended) if self.global_batch is not None:
                self.global_batch.assign(version, plan, units, ended=ended)
            case e.KeepCopy(order=order):
                self.backup.keep(order, self._on_task_end)
            case e.InheritWork(order=order):
                self.backup.inherit(order, time.monotonic, self._on_task_end)
            case e.Reset(reason=reason):
                self._inherited = None
                if self.units is not None:
                    self.units.reset()
                if self.global_batch is not None:
                    self.global_batch.reset()
                self.emit("reset", data={"reason": reason})
                self._hang_up()
            case e.GiveUp(reason=reason):
                self._fail(Refused(reason))
            case e.Disconnect(reason=reason):
                self.emit("epoch", data={"reason": reason})
                self._hang_up()
            case e.Notice(text=text) if text != self._notice:
                self._notice = text
                self.emit("hold", data={"text": text})

    def _send(self, message: m.FromReplica) -> None:
        if self._channel is None or self.cut_off:
            return
        sent = None
        if isinstance(message, m.Propose):
            c = message.contribution

            def sent() -> None:
                self.emit("gather", fragment=c.fragment, version=c.version + 1)

        self._channel.send(m.encode(message), sent)

    def _hang_up(self) -> None:
        if self._channel is not None:
            channel = self._channel
            task = asyncio.create_task(channel.close())
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    def _mirror(self) -> None:
        machine = self.machine
        with self._changed:
            for f in range(len(self._outstanding)):
                self._outstanding[f] = machine.fragments[f].outstanding
                self._released[f] = machine.fragments[f].released
                self._called_in[f] = machine.fragments[f].called_in
                self._means[f] = machine.fragments[f].means
            if machine.incarnation:
                self._incarnation = machine.incarnation
            self._welcomed |= machine.welcomed  # a resumed one holds a state before anybody has let it in
            let_in = self._welcomed and not self.backup.inheriting
            self._ready, self._may_train = machine.ready and let_in, machine.may_train and let_in
            self._changed.notify_all()
        if self.global_batch is not None:
            self.global_batch.poke()

    def drop(self, fragment: int, count: int) -> None:
        """``count`` proposals that the machine has not seen are void."""
        with self._changed:
            self._offered[fragment] -= count

    def inherit(self, ranges: Ranges, inherited: Inherited | None) -> None:
        """These units are this replica's, in this order; what it goes on from. Network thread."""
        if not contains(self.machine.lease.held, union(ranges)):
            inherited, ranges = None, ()  # given up meanwhile, or connected anew
        if self.units is not None:
            self.units.inherit(ranges)
        self._inherited = inherited
        self._mirror()

    @property
    def machine(self) -> Replica:
        """The replica machine; there from `start` on."""
        assert self._machine is not None
        return self._machine

    @property
    def host(self) -> Host:
        """The optimizer's side."""
        assert self._host is not None
        return self._host

    def _records(self) -> list[m.Record]:
        machine = self.machine
        records = [machine.fragments[f].record for f in range(machine.identity.fragments)]
        return [r for r in records if r is not None]

    def committed(self, record: m.Record) -> Committed:
        """``record`` as the host sees it."""
        machine = self.machine
        first = record if record.fragment == 0 else machine.fragments[0].record
        inner_step = first.inner_step if first is not None else record.inner_step
        return Committed(record.fragment, record.version, inner_step, machine.counted_step(record), record)

    # ------------------------------------------------------------ the reducer's word

    def reduced(self, fragment: int, attempt: int, digest: str, rows: list[list[int]]) -> None:
        """From the reducer thread."""
        machine = self.machine
        self._network.soon(lambda: self.run(machine.reduced(fragment, attempt, digest, rows)))

    def damaged(self, fragment: int, attempt: int, reason: str) -> None:
        """From the reducer thread."""
        machine = self.machine
        self._network.soon(lambda: self.run(machine.damaged(fragment, attempt, reason=reason)))

    def reduce_failed(self, fragment: int, attempt: int, reason: str, peer: str) -> None:
        """From the reducer thread."""
        machine = self.machine
        self._network.soon(lambda: self.run(machine.reduce_failed(fragment, attempt, reason=reason, peer=peer)))

    def send(self, message: m.FromReplica) -> None:
        """Sends a message of the rendezvous store; any thread.

        Raises:
            ConnectionError: the coordinator is away.
        """
        if self._channel is None:
            raise ConnectionError("the coordinator is away")
        self._network.soon(self._send, message)
