"""The interface by which the parts of a replica's shell (reducer, fetcher, copies) reach the rest of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ftopt.events import EmitEvent
from ftopt.sync.group import Committed, Host
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.replica.replica_copy import AdoptedWork
from ftopt.sync.replica.view import View


class Shell(Protocol):
    """The machine, and the shell around it. Network thread unless said otherwise."""

    replica: str
    policy: FaultPolicy
    view: View
    machine: Replica
    host: Host
    """The optimizer's side. Any thread."""

    @property
    def emit(self) -> EmitEvent:
        """Emits an event in this replica's name. Any thread."""

    @property
    def cut_off(self) -> bool:
        """Whether fault injection has cut this replica off."""

    def run(self, effects: list[e.ReplicaEffect]) -> None:
        """Performs the machine's effects."""

    def act(self, event: Callable[[Replica], list[e.ReplicaEffect]]) -> None:
        """Gives the machine an event, and performs its effects. Any thread."""

    def send(self, message: m.FromReplica) -> None:
        """Sends a message that is not the machine's. Any thread. Raises ConnectionError if the coordinator is away."""

    def accept(self, contribution: m.Contribution, now: bool) -> None:
        """Passes a proposal of the training thread on to the machine."""

    def adopt(self, ranges: Ranges, adopted: AdoptedWork | None) -> None:
        """Adopts the predecessor's units, in this order. ``adopted``: its work; None if there is no copy."""

    def watch(self, task: asyncio.Task[None]) -> None:
        """Ends the membership if the task fails."""

    def fail(self, where: str, error: BaseException) -> None:
        """Ends the membership, since ``where`` (a thread) has failed; the training thread raises. Any thread."""


def committed_of(machine: Replica, record: m.Record) -> Committed:
    """``record`` as the host of ``machine`` sees it."""
    first = record if record.fragment == 0 else machine.fragments[0].record
    inner_step = first.inner_step if first is not None else record.inner_step
    return Committed(record.fragment, record.version, inner_step, machine.counted_step(record), record)
