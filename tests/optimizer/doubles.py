"""Groups without a protocol, for tests of the optimizer alone: a fault-free table of n seats."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ftopt.sync.group import Attempt, Committed, Contribution, Fingerprint, Host
from ftopt.sync.settings import Sync
from ftopt.transport.local import LocalTransport


class Table:
    """``n`` replicas that all propose, always."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.transport = LocalTransport()
        self.barrier = threading.Barrier(n)
        self.contributions: dict[int, Contribution] = {}
        self.digests: dict[int, str] = {}
        self.seats = [Seat(self, rank) for rank in range(n)]


class Seat:
    """One replica's `ReplicaGroup`. Everything happens in `wait`, on the training thread."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table = table
        self.rank = rank
        self.replica = f"r{rank}"
        self.sync = Sync()
        self.incarnation = 1
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.reports: list[str] = []
        self.committed = Committed(0, 0, 0, 0)
        self.closed = False
        self.left_with: float | None = None
        self._host: Host | None = None
        self._outstanding: Contribution | None = None

    def start(self, host: Host, fingerprint: Fingerprint) -> list[Committed]:
        self._host = host
        self.fingerprint = fingerprint
        return [self.committed]

    def propose(self, contribution: Contribution) -> None:
        assert self._outstanding is None
        self._outstanding = contribution

    def wait(self, fragment: int) -> bool:
        mine, host = self._outstanding, self._host
        if mine is None or host is None:
            return True
        table = self.table
        table.contributions[self.rank] = mine
        table.barrier.wait(20)
        members = dict(table.contributions)
        version = self.committed.version + 1
        weights = [members[rank].weight for rank in range(table.n)]
        attempt = Attempt(
            fragment,
            version,
            version,
            self.rank,
            table.n,
            mine.weight,
            sum(weights),
            sum(w > 0 for w in weights),
        )
        collective = table.transport.connect(key=str(version), rank=self.rank, size=table.n)
        table.digests[self.rank] = host.reduce(attempt, collective)
        table.barrier.wait(20)
        assert len(set(table.digests.values())) == 1, table.digests
        most = max(members[rank].steps for rank in range(table.n) if members[rank].weight > 0 or table.n == 1)
        self.committed = Committed(fragment, version, self.committed.inner_step + most, mine.last_step)
        host.commit(attempt, self.committed)
        self._outstanding = None
        table.barrier.wait(20)
        return True

    def outstanding(self, fragment: int) -> bool:
        return self._outstanding is not None

    def called_in(self, fragment: int) -> bool:
        return False

    def report(self, *, state: str, inner_step: int, step_s: float) -> None:
        if not self.reports or self.reports[-1] != state:
            self.reports.append(state)

    def leave(self, *, timeout_s: float) -> None:
        self.left_with = timeout_s
        if timeout_s > 0:
            self.wait(0)

    def close(self) -> None:
        self.closed = True

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
        self.events.append((event, {"version": version, "inner_step": inner_step, "data": data}))


def alone() -> Seat:
    """A group of one."""
    return Table(1).seats[0]
