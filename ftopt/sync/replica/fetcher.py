"""The transfer of committed states: serves this replica's, and fetches its peers'. All on the network thread.

A fetch and the install of its result are one event for the machine. Proposals of the training thread in between wait
here: a successful install frees these contributions; otherwise the machine decides on them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from ftopt.sync.group import Contribution
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.protocol.wire import from_plain
from ftopt.sync.replica.shell import Shell, committed_of
from ftopt.transport.interface import Busy, Meta, SourceBusy, StateTransfer

_FETCH_AGAIN_S = 0.2
_BUSY_S = 1.0
"""Seconds that a peer waits for this replica's training thread before it asks another source."""
_LOOK_S = 0.005
_PATIENCE_S = 10.0
"""Seconds with busy sources alone until the fetch is reported as failed: the coordinator may know others by then."""

CopyOf = Callable[[str], tuple[Meta, Mapping[str, Tensor]]]


class Fetcher:
    """One replica's part in the transfer of committed states; also serves copies, from ``copy_of``."""

    def __init__(self, shell: Shell, transfer: StateTransfer, copy_of: CopyOf) -> None:
        self._shell = shell
        self._transfer = transfer
        self._copy_of = copy_of
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._deferred: dict[int, list[tuple[Contribution, bool]]] = {}

    async def start(self) -> str:
        """Starts to serve; returns the address for peers."""
        return await self._transfer.start(self._provide, self._on_serve)

    async def stop(self) -> None:
        """Ends fetches and serving."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._transfer.stop()

    def begin(self, effect: e.Fetch) -> None:
        """Starts a fetch; the machine asks for one at a time per fragment."""
        task = asyncio.create_task(self._fetch(effect))
        self._tasks[effect.position.fragment] = task
        self._shell.watch(task)

    def defers(self, contribution: Contribution, now: bool) -> bool:
        """Whether a proposal has to wait for an install under way; if so, it is kept."""
        if not self._shell.machine.fragments[contribution.fragment].installing:
            return False
        self._deferred.setdefault(contribution.fragment, []).append((contribution, now))
        return True

    async def _provide(self, what: str) -> tuple[Meta, Mapping[str, Tensor]]:
        """The `Provider`. An unexpected error here ends this replica's membership; the peer only gets a LookupError."""
        kind, _, name = what.partition("/")
        try:
            if kind == "copy":
                return self._copy(name)
            return await self._state(int(name))
        except LookupError:
            raise
        except Exception as error:
            self._shell.fail("the network thread", error)
            raise LookupError("this replica has failed") from error

    def _copy(self, replica: str) -> tuple[Meta, Mapping[str, Tensor]]:
        if self._shell.cut_off:
            raise LookupError("cut off")
        return self._copy_of(replica)

    async def _state(self, fragment: int) -> tuple[Meta, Mapping[str, Tensor]]:
        """The committed state, as soon as it can be read."""
        if not 0 <= fragment < self._shell.machine.identity.fragments:
            raise KeyError(fragment)
        ends_s = time.monotonic() + min(_BUSY_S, self._shell.policy.dead_after_s / 3)  # the peer gives up after that
        with self._shell.host.awaited(fragment):
            while True:
                try:
                    return self._held(fragment)
                except Busy:
                    if time.monotonic() >= ends_s:
                        raise
                await asyncio.sleep(_LOOK_S)

    def _held(self, fragment: int) -> tuple[Meta, Mapping[str, Tensor]]:
        if self._shell.cut_off:
            raise LookupError("cut off")
        record = self._shell.machine.fragments[fragment].serves()
        if record is None:
            raise LookupError("no committed state yet")
        digest, tensors = self._shell.host.state(fragment)
        return {"record": json.dumps(asdict(record), separators=(",", ":")), "digest": digest}, tensors

    def _on_serve(self, what: str, meta: Meta) -> None:
        kind, _, name = what.partition("/")
        if kind == "state":
            self._shell.emit("serve", fragment=int(name), version=_record(meta).version)

    async def _fetch(self, effect: e.Fetch) -> None:
        machine = self._shell.machine
        fragment = effect.position.fragment
        target = machine.fragments[fragment].wanted or effect
        at = target.position
        self._shell.emit("fetch", fragment=fragment, version=at.version)

        def expect(meta: Meta) -> None:
            record = _record(meta)
            if record.fragment != fragment or "digest" not in meta:
                raise ValueError(f"it is not the state of fragment {fragment}")
            if record.position != at and record.version <= at.version:
                raise ValueError(f"it holds version {record.version}, {at.version} is needed")

        since_s = time.monotonic()
        try:
            try:
                record, size = await self._take_soon(target, expect)
            except ValueError as error:
                if len(target.sources) < 2:
                    raise
                # Damaged by an unknown source: tries each source alone, the preferred one last.
                self._shell.emit("fetch_failed", fragment=fragment, version=at.version, data={"reason": str(error)})
                record, size = await self._take_from_any((*target.sources[1:], target.sources[0]), fragment, expect)
        except (ConnectionError, ValueError) as error:
            self._shell.emit("fetch_failed", fragment=fragment, version=at.version, data={"reason": str(error)})
            await asyncio.sleep(_FETCH_AGAIN_S)
            self._shell.run(machine.fetch_failed(fragment))
        else:
            data = {"bytes": size, "seconds": time.monotonic() - since_s, "committed_step": record.inner_step}
            self._shell.emit("fetched", fragment=fragment, version=record.version, data=data)
            # The install has freed the contributions that were proposed meanwhile.
            self._shell.view.drop(fragment, len(self._deferred.pop(fragment, [])))
            self._shell.run(machine.fetched(record))
        for contribution, now in self._deferred.pop(fragment, []):
            self._shell.accept(contribution, now)

    async def _take_soon(self, effect: e.Fetch, expect: Callable[[Meta], None]) -> tuple[m.Record, int]:
        """Repeats `_take` while no source gives the state and some are `Busy`, with their training threads in user
        code."""
        at, ends_s, told = effect.position, time.monotonic() + _PATIENCE_S, False
        while True:
            wanted = self._shell.machine.fragments[at.fragment].wanted or effect
            try:
                return await self._take(at.fragment, wanted.sources, expect)
            except SourceBusy as error:
                if time.monotonic() >= ends_s or self._shell.machine.fragments[at.fragment].wanted is None:
                    raise
                if not told:
                    data = {"reason": str(error)}
                    self._shell.emit("fetch_failed", fragment=at.fragment, version=at.version, data=data)
                told = True

    async def _take(
        self, fragment: int, sources: Sequence[str], expect: Callable[[Meta], None]
    ) -> tuple[m.Record, int]:
        """Fetches and installs; returns the installed record and the bytes received.

        Raises:
            ConnectionError: no source gives the state, or it is not wanted any more.
            ValueError: the received state is damaged; nothing has changed.
        """
        machine, timeout_s = self._shell.machine, self._shell.policy.dead_after_s
        meta, tensors = await self._transfer.fetch(sources, f"state/{fragment}", timeout_s=timeout_s, expect=expect)
        record = _record(meta)
        if self._shell.cut_off or not machine.install(record):
            raise ConnectionError(f"version {record.version} is not wanted any more")
        committed, reset = committed_of(machine, record), machine.fragments[fragment].reset
        await asyncio.to_thread(self._shell.host.install, committed, meta["digest"], tensors, reset=reset)
        return record, sum(tensor.nbytes for tensor in tensors.values())

    async def _take_from_any(
        self, sources: Sequence[str], fragment: int, expect: Callable[[Meta], None]
    ) -> tuple[m.Record, int]:
        answers = []
        for source in sources:
            try:
                return await self._take(fragment, [source], expect)
            except (ConnectionError, ValueError) as error:
                answers.append(f"{source}: {error}")
        raise ConnectionError("; ".join(answers))


def _record(meta: Meta) -> m.Record:
    try:
        return from_plain(m.Record, json.loads(meta["record"]))
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"the source's answer is no committed state: {error}") from None
