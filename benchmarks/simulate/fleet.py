"""Interfaces of a virtual fleet, and of a machine in it, for their other parts."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from benchmarks.simulate.assumptions import Model
from benchmarks.simulate.many_machines import MemberLists, SharedReplica
from benchmarks.simulate.tally import Tally
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r


class Node(ABC):
    """A machine with a replica. ``serves``: how many replicas fetch from it."""

    name: str
    alive: bool
    conn: int
    serves: int
    machine: SharedReplica

    @abstractmethod
    def act(self, effects: list[r.ReplicaEffect]) -> None:
        """Carries out the effects of the replica's state machine."""

    @abstractmethod
    def receive(self, message: m.FromCoordinator | None) -> None:
        """Takes a message that has arrived; None: the coordinator has closed the connection."""


class Fleet(ABC):
    """A clock, machines by name, and the connections to the coordinator."""

    now: float
    model: Model
    tally: Tally
    random: random.Random
    lists: MemberLists
    settings: dict[str, float | int | str | None]
    nodes: dict[str, Node]
    """The machines that are there; a machine that comes back is another replica of the same name."""

    @abstractmethod
    def at(self, delay_s: float, action: Callable[..., object], *args: Any) -> None:
        """Calls ``action(*args)`` after ``delay_s``."""

    @abstractmethod
    def connect(self, node: Node) -> int:
        """Opens a connection to the coordinator."""

    @abstractmethod
    def hang_up(self, conn: int) -> None:
        """Closes a replica's connection."""

    @abstractmethod
    def send(self, conn: int, message: m.FromReplica) -> None:
        """Sends a message from a replica to the coordinator."""
