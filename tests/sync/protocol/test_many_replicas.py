"""What a job of many replicas costs its coordinator: as much a replica as a small one."""

from __future__ import annotations

import copy
import random
from statistics import median_low
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.rounds.outliers import outliers
from tests.simulation.walk import run
from tests.sync.protocol.table import Seat, Table

MANY = 60


def _started() -> tuple[Table, list[Seat]]:
    table = Table(start_replicas=MANY)
    return table, list(table.start(*(f"r{i:02}" for i in range(MANY))))


def test_a_round_of_many_is_looked_at_a_few_times_and_not_with_each_message() -> None:
    table, seats = _started()
    before, order = table.coordinator.looks, random.Random(3)
    for seat in order.sample(seats, MANY):
        seat.propose(10)
    proposed = table.coordinator.looks
    assert proposed - before < MANY // 3
    for seat in order.sample(seats, MANY):
        seat.reduce()
    for seat in seats:
        seat.take()
    assert table.coordinator.looks - proposed < MANY // 3
    assert {seat.record.version for seat in seats} == {1}


def test_heartbeats_ask_for_no_look() -> None:
    table, seats = _started()
    looks = table.coordinator.looks
    for step in range(3):
        table.now += 0.5
        due_s = table.coordinator.deadline_s()
        for seat in seats:
            seat.say(m.Heartbeat("training", step, 0.1))
        assert table.coordinator.deadline_s() >= due_s
    assert table.coordinator.looks == looks


def test_those_who_start_a_job_are_known_before_the_first_is_let_in() -> None:
    table = Table(start_replicas=MANY)
    seats = [Seat(table, f"r{i:02}") for i in range(MANY)]
    for seat in seats:
        seat.open()
    assert all(not seat.got(m.RosterUpdate) for seat in seats)
    assert {len(seat.got(m.Welcome)[0].roster) for seat in seats} == {MANY}


def test_of_many_that_come_only_some_are_told_to_all_the_others() -> None:
    table = Table(start_replicas=10 * MANY)
    seats = [Seat(table, f"r{i:03}") for i in range(5 * MANY)]
    for seat in seats:
        seat.open()
    holds = sum(len(seat.got(m.Hold)) for seat in seats)
    assert len(seats) * 5 < holds < len(seats) ** 2 / 6
    assert len(seats[0].got(m.Hold)) > 5 * 10


@pytest.mark.long
def test_a_message_that_is_passed_over_would_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0
    decide = Coordinator._changes_nothing

    def checked(self: Coordinator, now: float, *rest: Any) -> bool:
        nonlocal passed
        found = decide(self, now, *rest)
        if found and not self.owes_look:  # else a look follows for what came before
            passed += 1
            looking = copy.deepcopy(self)
            assert looking.look(now) == []
            assert looking.deadline_s() >= self.deadline_s()
        return found

    monkeypatch.setattr(Coordinator, "_changes_nothing", checked)
    for seed in range(16):
        assert run(seed).failure is None
    assert passed > 100  # in how many histories one is passed over depends on the walk


def test_the_median_of_the_others_is_that_of_a_list_without_the_own_number() -> None:
    chance = random.Random(5)
    for _ in range(300):
        norms = [chance.choice((0.5, 1.0, 2.0, chance.uniform(0, 9))) for _ in range(chance.randint(3, 9))]
        norms[chance.randrange(len(norms))] *= 30
        offers = {
            f"r{i}": m.Contribution(0, 1, 10, 10, 10.0, norm=norm, excess=1e9, alone=1e9)
            for i, norm in enumerate(norms)
        }
        odd = set()
        for i, norm in enumerate(norms):
            median = median_low(norms[:i] + norms[i + 1 :])
            odd |= set() if median / 5 <= norm <= 5 * median else {f"r{i}"}
        assert outliers(offers, 5.0).keys() == odd
