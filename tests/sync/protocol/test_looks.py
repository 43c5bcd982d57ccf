"""A look at the rounds passes over those in which nothing has happened and nothing is due."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.rounds.rounds import Rounds
from tests.simulation.walk import run

_HISTORIES = 20


def test_a_round_that_is_passed_over_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    step, go_on, stepped, counts = Rounds.step, Coordinator._go_on, set[int](), Counter[str]()

    def noted(self: Rounds, now: float) -> Any:
        stepped.add(self.fragment)
        return step(self, now)

    def checked(self: Coordinator, now: float, only: Rounds | None) -> Any:
        stepped.clear()
        effects = go_on(self, now, only)
        if self.running and not (self._news or self.halted or self.failed):  # with news the next look is at all of them
            for r in (r for r in self.rounds if r.fragment not in stepped):
                counts["passed over"] += 1
                assert step(copy.deepcopy(r), now) == []
        return effects

    monkeypatch.setattr(Rounds, "step", noted)
    monkeypatch.setattr(Coordinator, "_go_on", checked)
    for seed in range(_HISTORIES):
        assert run(seed).failure is None
    assert counts["passed over"] > 100
