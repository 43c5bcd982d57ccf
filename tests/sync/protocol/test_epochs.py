"""Epochs that no clock can have given."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import limits
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table

NOW = 1_800_000_000
YEAR = 365 * 24 * 3600


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("epoch", [limits.MAX_EPOCH, NOW + 11 * YEAR])
def test_one_hello_does_not_make_a_job_unusable_for_ever(epoch: int, running: bool) -> None:
    table = Table(start_replicas=2)
    table.coordinator = Coordinator("j", now=table.now, life=NOW)
    seats = [Seat(table, name) for name in "ab"]
    for seat in seats if running else seats[:1]:
        seat.open()
    false = Seat(table, "x")
    false.machine.epoch = epoch
    false.open()
    assert "set the clock right" in false.pop(r.GiveUp).reason
    if not running:
        seats[1].open()
    for seat in seats:
        seat.take()
        assert seat.machine.welcomed and seat.machine.epoch < NOW + 10
        seat.propose(5)
    for seat in seats:
        seat.reduce()
    assert table.version == 1


def test_a_clock_that_is_years_ahead_is_not_the_end_of_a_job() -> None:
    """Its epochs are taken up by a coordinator whose clock is right."""
    table = Table(start_replicas=1)
    table.coordinator = Coordinator("j", now=table.now, life=NOW)
    seat = Seat(table, "a")
    seat.machine.epoch = NOW + 9 * YEAR
    seat.connect()
    assert seat.machine.welcomed and seat.machine.epoch == NOW + 9 * YEAR + 1


@pytest.mark.parametrize("clock", [limits.MAX_EPOCH - 1, limits.MAX_EPOCH, 1 << 40])
def test_beyond_2242_there_are_epochs_left(clock: int) -> None:
    table = Table(start_replicas=1)
    for _ in range(3):
        table.coordinator = Coordinator("j", now=table.now, life=clock)
        seat = Seat(table, "a")
        seat.machine.epoch = table.coordinator.epoch
        seat.connect()
        assert seat.machine.welcomed and seat.machine.epoch < limits.MAX_EPOCH - limits.FAR_EPOCHS
