"""A coordinator and its replicas in one process: the same machines and the same client, without sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ftopt.common.streams import used_here
from ftopt.events import OnEvent
from ftopt.sync.protocol import messages as m
from ftopt.sync.replica.link import Channel
from ftopt.sync.server.job import Job, Peer
from ftopt.sync.server.journal import Journal
from ftopt.transport.interface import Busy, Meta, Provider, SourceBusy

_log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
"""Seconds that the groups of a job may take to start in turn before the log names the missing ones."""


class LocalHub:
    """The coordinator of one job of this process; lives on the loop that its replicas share.

    Args:
        name: the job's.
        on_event: called with the coordinator's events.
        replicas: ids of the job's groups, of which some may be unused.
    """

    def __init__(self, name: str, on_event: OnEvent, replicas: Sequence[str] = ()) -> None:
        self.name = name
        self._replicas = tuple(dict.fromkeys(replicas))
        self.users = 0
        self.providers: dict[str, Provider] = {}
        """The provider of each replica's state, by its address."""
        self._on_event = on_event
        self._job: Job | None = None

    @property
    def job(self) -> Job:
        """The job, which is made on the loop's thread."""
        if self._job is None:
            self._job = Job(self.name, Journal(None), self._on_event)
            asyncio.get_running_loop().call_later(_PATIENCE_S, self._warn_of_missing)
        return self._job

    def _warn_of_missing(self) -> None:
        """Logs for which groups the job waits, if it has not started."""
        startup = self.job.machine.startup if self.users else None
        if startup is None:
            return
        here = {hello.replica for hello in startup.hellos.values()}
        if not here:
            asyncio.get_running_loop().call_later(_PATIENCE_S, self._warn_of_missing)
        elif missing := [replica for replica in self._replicas if replica not in here]:
            _log.warning(
                "ftopt.local_groups(%d): the job waits for %s, %g s at most (policy.start_s); start the optimizer of "
                "each group on a thread of its own, or make fewer groups, or give "
                "policy=ftopt.FaultPolicy(start_replicas=%d)",
                len(self._replicas), ", ".join(missing), startup.policy.start_s, len(here),
            )  # fmt: skip

    def release(self) -> None:
        """Releases one use of the hub; the last release stops the job's timer."""
        self.users -= 1
        if not self.users and self._job is not None:
            self._job.end()


class LocalLink:
    """A `Link` to a `LocalHub`."""

    def __init__(self, hub: LocalHub) -> None:
        self._hub = hub
        hub.users += 1

    async def open(self, receive: Callable[[str], None]) -> Channel:
        return _LocalChannel(self._hub.job, receive)

    async def end(self) -> None:
        self._hub.release()


class _LocalChannel:
    def __init__(self, job: Job, receive: Callable[[str], None]) -> None:
        self._job = job
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._conn = job.open(Peer(self._deliver, self._end))

    def send(self, text: str, sent: Callable[[], None] | None = None) -> None:
        self._loop.call_soon(self._pass_on, text)
        if sent is not None:
            sent()

    async def closed(self) -> None:
        await self._ended.wait()

    async def close(self) -> None:
        await asyncio.sleep(0)  # messages sent before go first
        self._job.lost(self._conn)
        self._ended.set()

    def _pass_on(self, text: str) -> None:
        message = m.decode(text)
        if not self._ended.is_set() and isinstance(message, m.FromReplica):
            self._job.receive(self._conn, message)

    def _deliver(self, text: str) -> None:
        self._loop.call_soon(self._hand_over, text)

    def _hand_over(self, text: str) -> None:
        if not self._ended.is_set():
            self._receive(text)

    def _end(self) -> None:
        self._loop.call_soon(self._ended.set)


class LocalState:
    """A `StateTransfer` between the replicas of a `LocalHub`, without bytes on a wire."""

    def __init__(self, hub: LocalHub, address: str) -> None:
        self._hub = hub
        self._address = address

    async def start(self, provider: Provider, on_serve: Callable[[str, Meta], None]) -> str:
        self._hub.providers[self._address] = provider
        return self._address

    async def fetch(
        self, sources: Sequence[str], what: str, *, timeout_s: float, expect: Callable[[Meta], None]
    ) -> tuple[Meta, Mapping[str, Tensor]]:
        answers, busy = [], False
        for source in sources:
            try:
                meta, tensors = await self._hub.providers[source](what)
                expect(meta)
            except (LookupError, ValueError) as error:
                answers.append(f"{source}: {error}")
                busy |= isinstance(error, Busy)
            else:
                used_here(tensors.values())
                return meta, {name: tensor.clone() for name, tensor in tensors.items()}
        raise (SourceBusy if busy else ConnectionError)("; ".join(answers))

    async def stop(self) -> None:
        self._hub.providers.pop(self._address, None)
