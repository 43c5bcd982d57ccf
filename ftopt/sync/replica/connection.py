"""The connection of a replica to the coordinator, reopened whenever it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from ftopt.errors import FtoptError, Refused, Unreachable
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.replica.link import Channel, Link
from ftopt.sync.replica.shell import Shell

_log = logging.getLogger(__name__)


class Connection:
    """A replica's connection. Network thread, unless said otherwise.

    Args:
        shell: performs the machine's effects when a connection is open.
        link: opens connections.
        connect_s: seconds after which it gives up if no coordinator has ever answered.
        newest: returns fragment 0's position in the newest checkpoint at hand; called on a worker thread.
        receive: called with each message that can be read.
        opened: called when a connection is open, after the machine has been told.
        lost: called when it is lost.
        ended: called with the reason when no further connection is opened.
    """

    def __init__(
        self,
        shell: Shell,
        link: Link,
        *,
        connect_s: float,
        newest: Callable[[], m.Position | None],
        receive: Callable[[object], None],
        opened: Callable[[], None],
        lost: Callable[[], None],
        ended: Callable[[FtoptError], None],
    ) -> None:
        self._shell, self._link, self._connect_s = shell, link, connect_s
        self._newest, self._receive = newest, receive
        self._opened, self._lost, self._ended = opened, lost, ended
        self._channel: Channel | None = None
        self._closing = set[asyncio.Task[None]]()
        self._cut_until_s = 0.0
        self.kept_out = ""
        """The answer of a coordinator that does not let this replica in; "": none answers."""
        self.said_bye = False
        """Whether this replica has said goodbye, so that no further connection is opened."""
        self.restores = False
        """Whether this side hangs up, to restore a checkpoint."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection. Any thread."""
        return self._channel is not None

    def cut(self, for_s: float) -> None:
        """Cuts this replica off for ``for_s`` seconds; call `hang_up`, too. Any thread."""
        self._cut_until_s = time.monotonic() + for_s

    @property
    def cut_off(self) -> bool:
        """Whether a `cut` lasts. Any thread."""
        return time.monotonic() < self._cut_until_s

    async def keep(self) -> None:
        """Connects, listens until the connection is lost, connects again."""
        shell, machine = self._shell, self._shell.machine
        give_up = time.monotonic() + self._connect_s
        ever, delay_s, complaint = False, 0.02, ""
        while True:
            if machine.may_restore:
                machine.checkpoint = await asyncio.to_thread(self._newest)
            try:
                if self.cut_off or shell.view.restoring:
                    raise ConnectionError("cut off" if self.cut_off else "a checkpoint is being restored")
                self._channel = channel = await self._link.open(self._hear)
            except (OSError, Refused) as error:
                if isinstance(error, Refused) and not ever:
                    self._ended(error)
                    return
                # Later refusals are not from the coordinator that let us in: the trainer goes on alone meanwhile.
                self.kept_out = str(error) if isinstance(error, Refused) else ""
                if isinstance(error, Refused) and str(error) != complaint:
                    complaint = str(error)
                    _log.warning("replica %s: %s", shell.replica, complaint)
                if not ever and time.monotonic() > give_up:
                    text = f"no coordinator answers within {self._connect_s:g} s ({error}); start one with "
                    text += "`ftopt coordinator`, or check the address and the network between"
                    self._ended(Unreachable(text))
                    return
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(0.5, delay_s * 2)
                continue
            ever, complaint = True, ""
            shell.run(machine.connect())
            self._opened()  # it may be lost before the next heartbeat
            await channel.closed()
            if machine.welcomed:
                self.kept_out, delay_s = "", 0.01
            delay_s = min(0.5, delay_s * 2)
            self._channel = None
            self._lost()
            if self.said_bye or machine.over:
                return
            if not self.restores:  # else this side has hung up, and the coordinator has said why
                shell.emit("disconnected")
            self.restores = False
            await asyncio.sleep(delay_s)

    def _hear(self, text: str) -> None:
        try:
            if self.cut_off:
                return
            try:
                message = m.decode(text)
            except m.MessageError as error:
                if self._shell.machine.welcomed:
                    raise
                self._cannot_read(error)
                return
            self._receive(message)
        except Exception as error:
            self._shell.fail("the network thread", error)

    def _cannot_read(self, error: m.MessageError) -> None:
        """Handles an unreadable answer to the hello, of a coordinator of another version: a replica that was let in
        before trains on, and tries again."""
        text = f"the coordinator speaks another protocol ({error}); install the same version of ftopt on both"
        machine = self._shell.machine
        if machine.incarnation and not machine.resumed:
            self._shell.run([e.Notice(text)])
            self.hang_up()
        else:
            self._ended(Refused(text))

    def send(self, message: m.FromReplica) -> None:
        """Sends a message, if there is a connection."""
        if self._channel is None or self.cut_off:
            return
        sent = None
        if isinstance(message, m.Propose):
            c = message.contribution

            def sent() -> None:
                self._shell.emit("gather", fragment=c.fragment, version=c.version + 1)

        self._channel.send(m.encode(message), sent)

    async def say_bye(self, message: m.Bye) -> None:
        """Sends the last message, and waits until the coordinator hangs up, which it does on hearing it."""
        self.said_bye = True
        if (channel := self._channel) is not None:
            channel.send(m.encode(message))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(channel.closed(), timeout=2.0)

    def beat(self, message: m.Heartbeat) -> None:
        """Sends a heartbeat; while the replica is cut off, it does not arrive."""
        if self._channel is not None:
            self._channel.send(m.encode(message))

    def hang_up(self) -> None:
        """Ends the connection, after all messages sent before."""
        if self._channel is not None:
            task = asyncio.create_task(self._channel.close())
            self._closing.add(task)
            self._shell.watch(task)
            task.add_done_callback(self._closing.discard)

    async def end(self) -> None:
        """Ends the connection for good."""
        for task in tuple(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        await self._link.end()
