"""Bugs in how replicas come, and come back; see `tests.sync.planted.rules`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry import admission
from ftopt.sync.protocol.coordinator.entry.admission import Contenders
from ftopt.sync.protocol.coordinator.entry.hellos import Hellos
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.replica.resumed import Held

Patch = pytest.MonkeyPatch


def refused_for_itself(patch: Patch) -> None:
    """A newcomer that waits and connects anew counts as two processes"""
    settle = Contenders.settle

    def mutant(self: Contenders, now: float, policy: FaultPolicy) -> Iterator[tuple[int, m.Hello, str]]:
        before = dict(self._hellos)
        for found in settle(self, now, policy):
            self._hellos = {conn: before[conn] for conn in self._hellos}
            yield found

    patch.setattr(admission, "one_process", lambda a, b: False)
    patch.setattr(Contenders, "settle", mutant)


def restored_without_a_cursor(patch: Patch) -> None:
    """A replica that comes out of a checkpoint does not report how far units were granted"""
    put_in = Replica._put_in

    def mutant(self: Replica, held: Held) -> None:
        put_in(self, held)
        self.lease.cursor = 0

    patch.setattr(Replica, "_put_in", mutant)


def placed_once(patch: Patch) -> None:
    """Who resumes and connects anew before it trains is not told that it holds the newest state"""
    hello = Replica.hello

    def mutant(self: Replica) -> m.Hello:
        said = hello(self)
        return replace(said, unplaced=said.resumed)

    patch.setattr(Replica, "hello", mutant)


def resumed_in_its_place(patch: Patch) -> None:
    """A process that resumes takes the place of the living one whose incarnation is in its checkpoint"""
    waits = Hellos._waits
    patch.setattr(Hellos, "_waits", lambda self, now, hello: not hello.resumed and waits(self, now, hello))
