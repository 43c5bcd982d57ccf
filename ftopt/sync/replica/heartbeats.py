"""A replica's heartbeats to the coordinator, and the log lines that are checked with each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.limits import MAX_STEP_S, MAX_WORD
from ftopt.sync.replica.connection import Connection
from ftopt.sync.replica.log.alone import Alone
from ftopt.sync.replica.log.rounds import RoundsLog
from ftopt.sync.replica.shell import Shell
from ftopt.sync.replica.tally import Losses


class Heartbeats:
    """Sends a replica's heartbeats. Network thread; the training thread writes the public fields.

    Args:
        shell: its machine and view are reported.
        connection: to the coordinator.
        rounds_log: logs what keeps steps out of a round.
        counts: the counts of the replica's life, from what its host has counted.
        pending: inner steps that no committed state contains.
        work: since when the loop waits for samples, the global batch's plan, and what is left of it.
    """

    def __init__(
        self,
        shell: Shell,
        connection: Connection,
        rounds_log: RoundsLog,
        *,
        counts: Callable[[int, int, int, int], m.Counts],
        pending: Callable[[], int],
        work: Callable[[], tuple[float | None, int, int]],
    ) -> None:
        self._shell, self._connection, self._rounds_log = shell, connection, rounds_log
        self._counts, self._work = counts, work
        self._standby = shell.view.standby
        self.state = "standby" if self._standby else "starting"
        """What the training thread is doing."""
        self.readings: dict[int, m.Reading] = {}
        self.losses = Losses()
        self._alone = Alone(shell.replica, lambda: None if shell.view.standby else pending(), shell.policy.dead_after_s)

    def look(self) -> None:
        """Checks whether a coordinator answers, for the log."""
        view, welcomed = self._shell.view, self._shell.machine.welcomed
        self._alone.look(
            welcomed=welcomed,
            reached=self._connection.is_open or view.restoring,  # to restore, it has closed the connection itself
            begun=welcomed and (view.may_train or self._standby),
            told=self._connection.kept_out,
        )

    async def beat(self) -> None:
        """Sends heartbeats until it is cancelled."""
        while True:
            if not self._connection.said_bye:
                self.look()
                self._rounds_log.look(time.monotonic())
                since_s, _, _ = self._work()
                waited_s = time.monotonic() - since_s if since_s is not None else 0.0
                self._rounds_log.waits_for_samples(waited_s, alone=not self._shell.machine.welcomed)
            self.send()
            await asyncio.sleep(self._shell.policy.derived.heartbeat_s)

    def send(self) -> None:
        """Sends a heartbeat, if the replica is let in."""
        if self._connection.is_open and self._shell.machine.welcomed:
            self._connection.beat(self._heartbeat())

    def _heartbeat(self) -> m.Heartbeat:
        state, (inner_step, step_s) = self.state, self._shell.host.standing()
        if self._shell.view.waiting and state == "training":
            state = "waiting"
        held = {(f.index, f.record.version) for f in self._shell.machine.fragments if f.record is not None}
        readings = tuple(x for x in list(self.readings.values()) if (x.fragment, x.version) in held)
        _, plan, left = self._work()
        known = readings, plan, left, self.losses.take(), self._counts(*self._shell.host.counted())
        return m.Heartbeat(state[:MAX_WORD], inner_step, min(step_s, MAX_STEP_S), *known)
