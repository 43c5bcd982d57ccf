"""What the training thread tells has taken effect, and is told once, also if the `on_event` that hears of it raises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.events import Event
from ftopt.methods import PAFT, DiLoCo, LocalSGD, Method, SyncSGD
from ftopt.run.harm import flip_bit


class Interrupting:
    """An ``on_event`` that notes all, and raises once at the event ``at``, like a Ctrl-C that comes there."""

    def __init__(self, at: str) -> None:
        self.at, self.events = at, list[Event]()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.event == self.at:
            self.at = ""
            raise KeyboardInterrupt

    def discarded(self) -> list[tuple[int | None, str, int]]:
        return [
            (e.fragment, str(e.data["reason"]), int(e.data["steps"])) for e in self.events if e.event == "discarded"
        ]


def train(optimizer: Any, model: nn.Module, bad: set[int], steps: int) -> int:
    """Trains, with a gradient that is not finite in the ``bad`` steps; counts Ctrl-Cs, and goes on."""
    interrupts = 0
    for step in range(1, steps + 1):
        model(torch.ones(2, 3)).square().mean().backward()
        if step in bad:
            next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
        try:
            optimizer.step()
        except KeyboardInterrupt:
            interrupts += 1
        optimizer.zero_grad()
    return interrupts


@pytest.mark.parametrize(
    "method",
    [LocalSGD(sync_every=2), DiLoCo(sync_every=2), PAFT(sync_every=4), SyncSGD()],
    ids=lambda method: method.name,
)
def test_steps_are_told_as_discarded_once_if_on_event_is_interrupted_there(method: Method) -> None:
    told = Interrupting("discarded")
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with ftopt.wrap(inner, model, method, group=ftopt.local_groups(1, on_event=told)[0]) as optimizer:
        interrupts = train(optimizer, model, {2}, 6)
        outer = optimizer._core.started()
        optimizer.sync()
        assert optimizer.pending_steps == 0
    assert interrupts == 1
    lost = 2 if method.gradients is None else 1
    assert told.discarded() == [(0, "nonfinite", lost)]
    assert outer.counters.nonfinite_drops == 1


def test_a_model_dropped_with_its_gradients_is_told_once_too() -> None:
    told = Interrupting("discarded")
    model = nn.Linear(3, 2)
    group = ftopt.local_groups(1, on_event=told)[0]
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with ftopt.wrap(inner, model, PAFT(sync_every=20), group=group) as optimizer:
        train(optimizer, model, set(), 3)
        outer = optimizer._core.started()
        first, parameters = outer.fragments
        outer._applier.drop(first, first.start, "nonfinite")
        with pytest.raises(KeyboardInterrupt):
            outer._applier.drop(first, first.start, "nonfinite")
        assert outer.counters.nonfinite_drops == 2 and outer.counters.inner_resets == 1
        assert parameters.pending_steps == 0
    assert told.discarded() == [(1, "replaced", 3)]


def test_what_is_proposed_of_a_model_is_not_dropped_with_its_gradients() -> None:
    """It may be counted yet: its steps would be both committed and discarded."""
    told = Interrupting("")
    model = nn.Linear(3, 2)
    group = ftopt.local_groups(1, on_event=told)[0]
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = ftopt.wrap(inner, model, PAFT(sync_every=20), group=group)
    with optimizer:
        train(optimizer, model, set(), 3)
        outer = optimizer._core.started()
        first, parameters = outer.fragments
        group.cut(600.0)  # type: ignore[attr-defined]
        assert outer.propose_pending(1, lr=0.01)
        assert group.outstanding(1)
        for _ in range(2):
            outer._applier.drop(first, first.start, "nonfinite")
        assert parameters.pending_steps == 3
        optimizer.close(timeout_s=0.0)
    assert told.discarded() == []


@pytest.mark.parametrize("event", ["damaged", "repaired"])
def test_work_on_a_repaired_state_is_pardoned_when_that_is_told(event: str) -> None:
    told = Interrupting(event)
    model = nn.Linear(3, 2)
    group = ftopt.local_groups(1, on_event=told)[0]
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with ftopt.wrap(inner, model, LocalSGD(sync_every=20), group=group) as optimizer:
        train(optimizer, model, set(), 3)
        fragment = optimizer._core.started().fragments[0]
        flip_bit([fragment.applied.anchor])
        for _ in range(2):
            fragment.exclude("out of line", void=True)
        assert train(optimizer, model, set(), 3) == 1
        assert fragment.pending_steps == 6 and not fragment.condemned
    assert [e.event for e in told.events if e.event in ("damaged", "repaired")] == ["damaged", "repaired"]
    assert told.discarded() == []
