"""What a wrapped optimizer adds to an inner step that does not sync, counted in calls: the same on every machine."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt._connect import connect, solo
from ftopt.events import Event
from ftopt.methods import DiLoCo, LocalSGD, Method, Timing
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.triggers import Due, Every, Progress, Trigger
from tests.optimizer.running import patient_solo

PACKAGE = str(Path(ftopt.__file__).parent)


def _wrapped(
    method: Method, *, layers: int = 2, undo: bool = False, **settings: Any
) -> tuple[ReplicaOptimizer, nn.Module]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    inner = torch.optim.AdamW(model.parameters(), **settings)
    return wrap(inner, model, method, group=patient_solo(), undo=undo), model


def _calls(optimizer: ReplicaOptimizer) -> list[str]:
    """The functions of ftopt that a step runs through."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname)

    gc.disable()  # what other tests have left may call ours when it goes
    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.mark.parametrize("layers", [2, 40])
@pytest.mark.parametrize(("undo", "calls_per_tensor"), [(False, 0), (True, 4)])
def test_a_step_that_does_not_sync_runs_through_few_functions_however_many_tensors_unless_they_are_recorded(
    layers: int, undo: bool, calls_per_tensor: int
) -> None:
    optimizer, model = _wrapped(DiLoCo(sync_every=100), layers=layers, undo=undo)
    with optimizer:
        for _ in range(3):
            optimizer.step()
        calls = _calls(optimizer)
    assert len(calls) <= (25 if undo else 15) + calls_per_tensor * len(list(model.parameters())), calls


def test_a_trigger_is_asked_at_every_step_and_a_mere_period_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = Timing.due

    def due(timing: Timing, progress: Progress) -> Due:
        asked.append(progress.local_steps)
        return real(timing, progress)

    monkeypatch.setattr(Timing, "due", due)
    for method, expected in (
        (LocalSGD(sync_every=3), [3, 6]),
        (LocalSGD(sync_every=9, trigger=Every(3)), [1, 2, 3, 4, 5, 6, 7]),
        (LocalSGD(sync_every=3, average_until_step=1), [1, 2, 3, 4, 5, 6, 7]),
    ):
        asked.clear()
        optimizer, _ = _wrapped(method)
        with optimizer:
            for _ in range(7):
                optimizer.step()
            assert asked == expected
            assert optimizer.pending_steps in (0, 1)


def test_a_rule_of_the_users_own_is_asked_at_every_step() -> None:
    class Odd(Trigger):
        def due(self, progress: Progress) -> Due:
            return Due.YES if progress.local_steps in (2, 3) else Due.NO

    optimizer, _ = _wrapped(LocalSGD(sync_every=9, trigger=Odd()))
    with optimizer:
        versions = []
        for _ in range(5):
            optimizer.step()
            versions.append(optimizer.status.versions[0])
    assert versions == [0, 1, 2, 2, 2]


def test_the_rate_is_not_read_at_a_step_that_does_not_sync() -> None:
    """One that is a tensor on an accelerator would be waited for."""
    optimizer, _ = _wrapped(DiLoCo(sync_every=3), lr=0.1)
    core = optimizer._core
    read: list[int] = []
    real = core.inner.largest_lr

    def largest_lr() -> float:
        read.append(optimizer.local_steps)
        return real()

    core.inner.largest_lr = largest_lr  # type: ignore[method-assign]
    with optimizer:
        for _ in range(7):
            optimizer.step()
        assert read == [3, 6]


def test_every_step_is_told_to_those_who_want_to_know_alone() -> None:
    class Seldom:
        every_step = False

        def __call__(self, event: Event) -> None:
            assert event.event not in ("inner", "stepped")
            told.append(event.event)

    told: list[str] = []
    model = nn.Linear(2, 2)
    optimizer = wrap(torch.optim.SGD(model.parameters()), model, LocalSGD(sync_every=2), group=solo(on_event=Seldom()))
    with optimizer:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert "apply" in told
    assert solo(on_event=told.append).tells_steps  # type: ignore[arg-type]
    assert not solo().tells_steps
    assert not connect("http://127.0.0.1:9", "r0").tells_steps, "what it logs is of other events"
