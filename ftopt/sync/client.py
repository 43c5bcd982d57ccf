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
import json
import logging
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ftopt.errors import FtoptError, Refused, Unreachable
from ftopt.events import Event, OnEvent
from ftopt.sync.group import Committed, Contribution, Fingerprint, Host
from ftopt.sync.link import Channel, Link
from ftopt.sync.loop import LoopThread
from ftopt.sync.ports import Meta, StateTransfer, Transport
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol import replica as p
from ftopt.sync.protocol.settings import Sync
from ftopt.sync.reducer import Reducer

_log = logging.getLogger(__name__)
_FETCH_AGAIN_S = 0.2


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
        self._job = job
        self._link = link
        self._state = state
        self._network = network
        self._on_event = on_event
        self._connect_s = connect_s
        self._machine: p.Replica | None = None
        self._host: Host | None = None
        self._changed = threading.Condition()
        self._failure: FtoptError | None = None
        self._incarnation = 0
        self._ready = False
        self._closed = False
        self._progress = ("starting", 0, 0.0)
        self._waiting = False
        self._leaving = False
        self._outstanding: list[bool] = []
        self._released: list[bool] = []
        self._called_in: list[bool] = []
        self._offered: list[int] = []
        # Network thread only.
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._deferred: dict[int, list[Contribution]] = {}
        self._installing: set[int] = set()
        self._notice = ""
        self._said_bye = False
        self._reducer = Reducer(self, transport)

    # ------------------------------------------------------------ training thread

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def start(self, host: Host, fingerprint: Fingerprint) -> list[Committed]:
        self._host = host
        self._network.acquire()
        count = fingerprint.fragments
        self._outstanding, self._released, self._called_in = [False] * count, [False] * count, [False] * count
        self._offered = [0] * count
        self._reducer.start()
        self._network.submit(self._open(fingerprint)).result()
        try:
            with self._changed:
                while not self._ready and self._failure is None:
                    self._changed.wait()
                if self._failure is not None:
                    raise self._failure
        except BaseException:
            self.close()
            raise
        return self._network.submit(self._committed()).result()

    def propose(self, contribution: Contribution) -> None:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._offered[contribution.fragment] += 1
        self._network.soon(self._propose, contribution)

    def wait(self, fragment: int) -> bool:
        self._waiting = True
        try:
            with self._changed:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if not self.outstanding(fragment) or self._closed:
                        return True
                    if self._released[fragment] and not self._offered[fragment]:
                        return False
                    self._changed.wait()
        finally:
            self._waiting = False

    def outstanding(self, fragment: int) -> bool:
        return bool(self._offered[fragment]) or self._outstanding[fragment]

    def called_in(self, fragment: int) -> bool:
        return self._called_in[fragment]

    def report(self, *, state: str, inner_step: int, step_s: float) -> None:
        self._progress = (state, inner_step, step_s)
        if state == "leaving" and not self._leaving:
            self._leaving = True
            self._network.soon(self._leave)

    def leave(self, *, timeout_s: float) -> None:
        if self._machine is None or self._closed or self._failure is not None:
            return
        _, inner_step, step_s = self._progress
        self.report(state="leaving", inner_step=inner_step, step_s=step_s)
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
            inner_step = self._progress[1]
        self._on_event(
            Event(event, self.replica, self._incarnation, fragment, version, attempt, inner_step, data or {})
        )

    # ------------------------------------------------------------ network thread: life

    async def _open(self, fingerprint: Fingerprint) -> None:
        address = await self._state.start(self._provide, self._on_serve)
        settings = asdict(self.sync)
        lines = dict(fingerprint.lines) | {f"sync.{k}": str(v) for k, v in settings.items()}
        identity = p.Identity(
            job=self._job,
            replica=self.replica,
            lines=lines,
            settings=settings,
            initial=fingerprint.initial,
            fragments=fingerprint.fragments,
            address=address,
        )
        self._machine = p.Replica(identity)
        self._tasks = [asyncio.create_task(self._session()), asyncio.create_task(self._beat())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def _session(self) -> None:
        """Connects, listens until the connection is lost, connects again."""
        machine = self._machine
        assert machine is not None
        give_up = time.monotonic() + self._connect_s
        ever, delay_s = False, 0.02
        while True:
            try:
                self._channel = channel = await self._link.open(self._receive)
            except Refused as error:
                self._fail(error)
                return
            except OSError as error:
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
            ever = True
            self._run(machine.connect())
            await channel.closed()
            delay_s = 0.02 if machine.welcomed else min(0.5, delay_s * 2)
            self._channel = None
            self._run(machine.disconnect())
            self._reducer.fail_store()
            if self._said_bye:
                return
            self.emit("disconnected")
            await asyncio.sleep(delay_s)

    async def _beat(self) -> None:
        while True:
            machine, channel = self._machine, self._channel
            if channel is not None and machine is not None and machine.welcomed:
                state, inner_step, step_s = self._progress
                if self._waiting and state == "training":
                    state = "waiting"
                channel.send(m.encode(m.Progress(state, inner_step, step_s)))
            await asyncio.sleep(self.sync.heartbeat_s)

    async def _bye(self) -> None:
        self._said_bye = True
        if (channel := self._channel) is not None:
            channel.send(m.encode(m.Bye()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(channel.closed(), timeout=2.0)  # the coordinator hangs up when it has heard it

    async def _end(self) -> None:
        for task in [*self._tasks, *self._fetches.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._fetches.values(), return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        await self._link.end()
        await self._state.stop()

    async def _committed(self) -> list[Committed]:
        return [self._meta(record) for record in self._records()]

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("replica %s: the network thread failed", self.replica, exc_info=error)
            self._fail(FtoptError(f"the outer-sync layer of {self.replica} failed: {error!r}; please report this"))

    def _fail(self, error: FtoptError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ------------------------------------------------------------ network thread: the machine

    def _receive(self, text: str) -> None:
        machine = self._machine
        assert machine is not None
        message = m.decode(text)
        if isinstance(message, m.StoreValue):
            self._reducer.store_value(message.key, base64.b64decode(message.value))
        elif isinstance(message, m.FromCoordinator):
            self._run(machine.receive(message))

    def _propose(self, contribution: Contribution) -> None:
        machine = self._machine
        assert machine is not None
        if contribution.fragment in self._installing:
            self._deferred.setdefault(contribution.fragment, []).append(contribution)
            return
        effects = machine.propose(contribution)
        with self._changed:
            self._offered[contribution.fragment] -= 1
        self._run(effects)

    def _leave(self) -> None:
        if self._machine is not None:
            self._run(self._machine.leave())

    def _run(self, effects: list[p.Effect]) -> None:
        for effect in effects:
            self._perform(effect)
        self._mirror()

    def _perform(self, effect: p.Effect) -> None:
        match effect:
            case p.Send(message=message):
                self._send(message)
            case p.StartReduce():
                self._reducer.begin(effect)
            case p.StopReduce(fragment=fragment, attempt=attempt):
                self._reducer.abort(attempt)
                self.host.discard(fragment)
            case p.Adopt(attempt=attempt, record=record):
                started = self._reducer.started(attempt)
                self.emit("commit", fragment=record.fragment, version=record.version, attempt=attempt)
                self.host.commit(started, self._meta(record))
            case p.Begin(record=record, reborn=reborn):
                if reborn:  # otherwise the host begins with its own state anyway
                    digest, tensors = self.host.state(record.fragment)
                    self.host.install(self._meta(record), digest, tensors, reborn=True)
            case p.Fetch(position=position):
                task = asyncio.create_task(self._fetch(effect))
                self._fetches[position.fragment] = task
                task.add_done_callback(self._on_task_end)
            case p.Reborn(reason=reason):
                self.emit("reborn", data={"reason": reason})
                self._hang_up()
            case p.GiveUp(reason=reason):
                self._fail(Refused(reason))
            case p.Disconnect(reason=reason):
                self.emit("epoch", data={"reason": reason})
                self._hang_up()
            case p.Notice(text=text) if text != self._notice:
                self._notice = text
                self.emit("hold", data={"text": text})

    def _send(self, message: m.FromReplica) -> None:
        if self._channel is None:
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
        machine = self._machine
        assert machine is not None
        with self._changed:
            for f in range(len(self._outstanding)):
                self._outstanding[f] = machine.outstanding(f)
                self._released[f] = machine.released(f)
                self._called_in[f] = machine.called_in(f)
            if machine.incarnation:
                self._incarnation = machine.incarnation
            self._ready = machine.ready
            self._changed.notify_all()

    @property
    def host(self) -> Host:
        assert self._host is not None
        return self._host

    def _records(self) -> list[m.Record]:
        machine = self._machine
        assert machine is not None
        records = [machine.record(f) for f in range(machine.identity.fragments)]
        return [r for r in records if r is not None]

    def _meta(self, record: m.Record) -> Committed:
        machine = self._machine
        assert machine is not None
        first = record if record.fragment == 0 else machine.record(0)
        inner_step = first.inner_step if first is not None else record.inner_step
        return Committed(record.fragment, record.version, inner_step, machine.counted_step(record))

    # ------------------------------------------------------------ network thread: the committed state

    def _provide(self, fragment: int) -> tuple[Meta, Mapping[str, Tensor]]:
        machine = self._machine
        if machine is None or not 0 <= fragment < machine.identity.fragments:
            raise KeyError(fragment)
        record = machine.serves(fragment)
        if record is None:
            raise LookupError("no committed state")
        digest, tensors = self.host.state(fragment)
        return {"record": json.dumps(asdict(record), separators=(",", ":")), "digest": digest}, tensors

    def _on_serve(self, fragment: int, meta: Meta) -> None:
        self.emit("serve", fragment=fragment, version=_record(meta).version)

    async def _fetch(self, effect: p.Fetch) -> None:
        machine = self._machine
        assert machine is not None
        fragment = effect.position.fragment
        target = machine.latest_fetch(fragment) or effect
        at = target.position
        self.emit("fetch", fragment=fragment, version=at.version)

        def expect(meta: Meta) -> None:
            record = _record(meta)
            if record.position != at and record.version <= at.version:
                raise ValueError(f"it holds version {record.version}, {at.version} is needed")

        try:
            meta, tensors = await self._state.fetch(
                target.sources, fragment, timeout_s=self.sync.dead_after_s, expect=expect
            )
            record = _record(meta)
            if not machine.install(record):
                raise ConnectionError(f"version {record.version} is not wanted any more")
            self._installing.add(fragment)
            reborn = machine.reborn_in(fragment)
            await asyncio.to_thread(self.host.install, self._meta(record), meta["digest"], tensors, reborn=reborn)
        except (ConnectionError, ValueError) as error:
            self.emit("fetch_failed", fragment=fragment, version=at.version, data={"reason": str(error)})
            await asyncio.sleep(_FETCH_AGAIN_S)
            self._installing.discard(fragment)
            self._run(machine.fetch_failed(fragment))
        else:
            self._installing.discard(fragment)
            self.emit("fetched", fragment=fragment, version=record.version)
            with self._changed:  # the install has freed what was to be proposed meanwhile
                self._offered[fragment] -= len(self._deferred.pop(fragment, []))
            self._run(machine.fetched(record))
        for contribution in self._deferred.pop(fragment, []):
            self._propose(contribution)

    # ------------------------------------------------------------ the reducer's word

    def reduced(self, fragment: int, attempt: int, digest: str, rows: list[list[int]]) -> None:
        """From the reducer thread."""
        assert self._machine is not None
        machine = self._machine
        self._network.soon(lambda: self._run(machine.reduced(fragment, attempt, digest, rows)))

    def reduce_failed(self, fragment: int, attempt: int, reason: str, peer: str) -> None:
        """From the reducer thread."""
        assert self._machine is not None
        machine = self._machine
        self._network.soon(lambda: self._run(machine.reduce_failed(fragment, attempt, reason=reason, peer=peer)))

    def send(self, message: m.FromReplica) -> None:
        """Sends a message of the rendezvous store; any thread.

        Raises:
            ConnectionError: the coordinator is away.
        """
        if self._channel is None:
            raise ConnectionError("the coordinator is away")
        self._network.soon(self._send, message)


def _record(meta: Meta) -> m.Record:
    try:
        return m.from_plain(m.Record, json.loads(meta["record"]))
    except (KeyError, ValueError) as error:
        raise ValueError(f"the source's answer is no committed state: {error}") from None
