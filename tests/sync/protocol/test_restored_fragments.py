"""A checkpoint of several fragments is restored while a replica is here that lacks the last version of one of them."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.resumed import Held
from ftopt.sync.protocol.samples import Samples
from tests.sync.protocol.table import Seat, Table
from tests.sync.protocol.test_end import leave, round_of


def here(table: Table, seat: Seat, seconds: float) -> None:
    """Time passes; the seat connects again whenever its connection is closed."""
    table.tick(seconds)
    if seat.conn is None:
        seat.open()
    seat.take()


@pytest.mark.parametrize("reads_s", [2.0, 10.0, 100.0])
@pytest.mark.parametrize("end", ["died", "left", "data", "data and a restart"])
def test_who_lacks_the_last_version_of_a_fragment_does_not_overtake_a_checkpoint(end: str, reads_s: float) -> None:
    samples = Samples(samples=20, batch_size=1, epochs=1) if "data" in end else None
    table = Table(fragments=2, samples=samples, wants=10, start_replicas=2)
    a, b = table.start("a", "b")
    for step in (5, 10):
        if samples is not None:
            for seat in (a, b):
                seat.do(seat.machine.ask())
                seat.take()
                seat.use(5)
        round_of(a, b, last_step=step)
        if step == 10:
            b.cut()
        round_of(*((a, b) if step == 5 else (a,)), last_step=step, fragment=1)
    saved = (a.held(0), a.held(1))
    if end == "died":
        a.die()
    else:
        leave(a, finished=True)
    if end == "data and a restart":
        table.restart(journal=True)
    a = Seat(table, "a")
    a.machine.checkpoint = saved[0].position
    a.open()
    while not any(isinstance(x, r.RestoreCheckpoint) for x in a.asked):
        assert table.now < 1_000.0
        here(table, a, 10.0)
    b.open()
    for _ in range(10):
        here(table, b, reads_s / 10)
    a.machine.restore(Held("a", a.machine.incarnation, 0, records=saved))
    a.open()
    for _ in range(10):
        table.tick(5.0)
        a.take()
        b.take()
    assert not any(isinstance(x, r.Reset) for x in a.asked)
    assert [x.at.version for x in table.coordinator.rounds] == [2, 2]
