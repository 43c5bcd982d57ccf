"""Copies of replicas between two inner steps (``recover: replay``): this one's own, and those that it keeps.

A new copy replaces the one before once it is complete and sound. Copies are in memory, and handled on the network
thread. Only the optimizer knows what is in a copy. When this process takes the place of a dead replica, it fetches the
copy before training starts, and puts the units in the order in which the dead replica would have used them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from torch import Tensor

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import in_order
from ftopt.sync.protocol.limits import MAX_TEXT
from ftopt.sync.replica.replica_copy import AdoptedWork, ReplicaCopy
from ftopt.sync.replica.shell import Shell
from ftopt.transport.interface import Meta, StateTransfer

_log = logging.getLogger(__name__)
_KEEP_GONE_S = 60.0
"""Seconds for which the copy of a gone replica is kept: its replacement, if any, fetches it in that time."""


class Copies:
    """One replica's own copy, and the copies that it keeps for neighbours."""

    def __init__(self, shell: Shell, transfer: StateTransfer) -> None:
        self._shell = shell
        self._transfer = transfer
        self._own: ReplicaCopy | None = None
        self._serial = 0
        self._alone = False
        """Whether nobody keeps its copies, as the coordinator has said."""
        self.settled = 0
        """The number of the newest own copy that was kept or could not be fetched. Any thread reads it."""
        self.check: Callable[[str, Mapping[str, Tensor]], None] = lambda text, tensors: None
        """Raises ValueError for a copy that was changed while it was read."""
        self._kept: dict[str, ReplicaCopy] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.adopting = False
        """Whether a predecessor's copy is being fetched."""

    def copy_of(self, replica: str) -> tuple[Meta, Mapping[str, Tensor]]:
        """Returns the copy to serve. Raises LookupError if there is none."""
        copy = self._own if replica == self._shell.replica else self._kept.get(replica)
        if copy is None:
            raise LookupError(f"no copy of {replica}")
        return copy.meta(), copy.tensors

    def offer(self, copy: ReplicaCopy) -> None:
        """Offers this replica's own copy; the coordinator chooses its keeper."""
        self._own, self._serial = copy, self._serial + 1
        self._shell.run(self._shell.machine.say(m.Copied(self._serial, copy.versions)))

    def keep(self, order: m.Keep) -> None:
        """Fetches a neighbour's copy."""
        self._begin(order.incarnation_id[0], self._keep(order))

    def kept(self, told: m.Kept) -> None:
        """The keeper has this replica's newest copy, or could not fetch it; or there is no keeper (said only once)."""
        self.settled = max(self.settled, told.serial)
        if not told.keeper:
            self._alone = True
            _log.warning("replica %s: %s", self._shell.replica, told.reason)
        elif self._alone and not told.reason:
            self._alone = False
            _log.warning("replica %s: %s keeps its copies now", self._shell.replica, told.keeper)

    def adopt(self, order: m.Inherit) -> None:
        """Fetches the predecessor's copy."""
        self.adopting = True
        self._begin("", self._adopt(order))

    def gone(self, incarnation_ids: tuple[m.IncarnationId, ...]) -> None:
        """Drops the copies of gone incarnations later, since their replacements may still ask for them."""
        for replica, life in incarnation_ids:
            if (kept := self._kept.get(replica)) is not None and kept.incarnation_id[1] <= life:
                asyncio.get_running_loop().call_later(_KEEP_GONE_S, self._drop, kept)

    def lost(self) -> None:
        """Drops all copies, since the connection has ended: the coordinator counts on none of them any more."""
        self._kept.clear()

    async def stop(self) -> None:
        """Cancels fetches, and drops all copies."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._own = None
        self._kept.clear()

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        if (before := self._tasks.get(name)) is not None:
            before.cancel()
        self._tasks[name] = asyncio.create_task(work)
        self._shell.watch(self._tasks[name])

    def _drop(self, copy: ReplicaCopy) -> None:
        if self._kept.get(copy.incarnation_id[0]) is copy:
            del self._kept[copy.incarnation_id[0]]

    async def _keep(self, order: m.Keep) -> None:
        machine, whose = self._shell.machine, order.incarnation_id
        try:
            copy = await self._fetch(whose, order.source)
            await asyncio.to_thread(self.check, copy.text, copy.tensors)
        except (ConnectionError, ValueError) as error:  # it may have died meanwhile
            _log.info("replica %s keeps no newer copy of %s: %s", self._shell.replica, whose[0], error)
            self._shell.run(machine.say(m.KeepFailed(order.incarnation_id, order.serial, str(error)[:MAX_TEXT])))
            return
        self._kept[whose[0]] = copy
        self._shell.run(machine.say(m.Keeps(order.incarnation_id, order.serial)))

    async def _adopt(self, order: m.Inherit) -> None:
        began = time.monotonic()
        adopted: AdoptedWork | None = None
        try:
            copy = await self._fetch(order.incarnation_id, order.source)
            adopted = AdoptedWork(copy, order.inner_step, time.monotonic() - began)
        except (ConnectionError, ValueError) as error:
            self._shell.emit("replay_failed", data={"of": list(order.incarnation_id), "reason": str(error)})
        self.adopting = False
        known = (*adopted.copy.used, *adopted.copy.queue) if adopted is not None else ()
        self._shell.adopt(in_order(order.ranges, known), adopted)

    async def _fetch(self, incarnation_id: m.IncarnationId, source: str) -> ReplicaCopy:
        def expect(meta: Meta) -> None:
            if ReplicaCopy.of(meta, {}).incarnation_id != incarnation_id:
                raise ValueError(f"it holds no copy of {incarnation_id[0]}, incarnation {incarnation_id[1]}")

        what, timeout_s = f"copy/{incarnation_id[0]}", self._shell.policy.dead_after_s
        meta, tensors = await self._transfer.fetch([source], what, timeout_s=timeout_s, expect=expect)
        return ReplicaCopy.of(meta, tensors)
