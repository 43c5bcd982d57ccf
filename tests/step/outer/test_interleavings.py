"""Outer steps that are broken off, decided at odd moments, or weigh nothing: no inner step is lost, none is
corrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups
from ftopt.fragments import Strided
from ftopt.methods import (
    BySpeed,
    DiLoCo,
    Execution,
    LocalSGD,
    Method,
    OuterState,
    ReplicaView,
    Round,
    SlowMo,
    StreamingDiLoCo,
)
from ftopt.methods.method import reads_tensors
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.step.outer.reduction import Reduction
from ftopt.step.outer.schedule import SyncSchedule
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors import pieces
from ftopt.step.tensors.pool import CopyPool
from ftopt.sync.group import AttemptView, Collective, Contribution, ReplicaGroup
from ftopt.sync.replica.loop import LoopThread
from ftopt.triggers import Every
from tests.optimizer.running import PATIENT, anchor, together
from tests.problems import problem

TASK = problem("mlp", "sgd")
DELAYED = StreamingDiLoCo(sync_every=4, delay=2, fragments=Strided(n=1), wait_for_result_s=60.0)


def _start(method: Method, model: nn.Module, group: ReplicaGroup) -> ReplicaOptimizer:
    return wrap(TASK.inner(model.parameters()), model, method, group=group)


def _step(optimizer: ReplicaOptimizer, model: nn.Module, m: int, step: int, *, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    TASK.backward(model, m, step)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(scale)
    optimizer.step()


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _run(n: int, replica: Callable[[int, nn.Module, ReplicaGroup], object], **policy: float) -> list[object]:
    models, groups = [TASK.model(0) for _ in range(n)], local_groups(n, policy=replace(PATIENT, **policy))
    return together([lambda m=m: replica(m, models[m], groups[m]) for m in range(n)])  # type: ignore[misc]


@pytest.mark.parametrize("method", [LocalSGD(sync_every=2), DiLoCo(sync_every=2)], ids=["local_sgd", "diloco"])
def test_who_weighs_nothing_adds_nothing(method: Method) -> None:
    """Its payload has been made when it was frozen, for a share that the round then does not give it."""

    def replica(m: int, model: nn.Module, group: ReplicaGroup, wild: float) -> Tensor:
        with _start(method, model, group) as optimizer:
            before = _flat(anchor(optimizer, model))
            for step in range(2):
                _step(optimizer, model, m, step, scale=wild if m == 1 else 1.0)
            return _flat(anchor(optimizer, model)) - before

    moved = [_run(3, lambda *a, wild=wild: replica(*a, wild), outlier_ratio=10.0) for wild in (1e3, 1e4)]
    assert torch.equal(moved[0][0], moved[1][0])  # type: ignore[arg-type]
    assert float(moved[0][0].norm()) < 1.0  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class PerStep(LocalSGD):
    """Its payload goes by more than tensors."""

    pieces: bool = True

    @property
    def execution(self) -> Execution:
        return Execution(elementwise=self.pieces)

    def payload(self, view: ReplicaView, out: Tensor) -> Tensor:
        return torch.sub(view.start, view.params, out=out).div_(view.steps * view.lr)

    def outer_step(
        self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.sub(anchor, mean.mul_(0.1)), {}


def test_a_payload_that_is_made_early_knows_steps_and_rate() -> None:
    def replica(m: int, model: nn.Module, group: ReplicaGroup, pieces: bool) -> Tensor:
        with _start(PerStep(sync_every=3, pieces=pieces), model, group) as optimizer:
            for step in range(6):
                _step(optimizer, model, m, step)
            return _flat(anchor(optimizer, model))

    early, late = (_run(2, lambda *a, pieces=pieces: replica(*a, pieces)) for pieces in (True, False))
    assert torch.equal(early[0], late[0])  # type: ignore[arg-type]


def test_what_is_decided_in_place_is_taken_up_although_the_method_overlaps_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others bring more steps than this replica: the averages end (``average_until_step``) by the commit itself."""
    averages = SyncSchedule.averages
    monkeypatch.setattr(SyncSchedule, "averages", lambda self, f: averages(self, f) and f.state is f.applied)
    method = replace(DELAYED, average_until_step=3)

    def replica(m: int, model: nn.Module, group: ReplicaGroup) -> None:
        with _start(method, model, group) as optimizer:
            for step in range(3):
                _step(optimizer, model, m, step)
                (fragment,) = optimizer._core.started().fragments
                assert fragment.state is fragment.applied and fragment.base.params is fragment.start
                optimizer._core.saving.capture(CopyPool())
            for step in range(3, 9):
                _step(optimizer, model, m, step)

    _run(1, replica)


@pytest.mark.parametrize("decided", [True, False], ids=["decided", "undecided"])
def test_an_interrupted_wait_loses_no_step(decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def replica(m: int, model: nn.Module, group: ReplicaGroup, interrupts: bool) -> Tensor:
        def interrupted(self: OuterStep, index: int, timeout_s: float | None = None) -> bool:
            if decided:
                group.wait(index)
            raise KeyboardInterrupt

        with _start(DiLoCo(sync_every=2), model, group) as optimizer:
            for step in range(6):
                if step == 3 and interrupts:
                    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                        patch.setattr(OuterStep, "_wait", interrupted)
                        _step(optimizer, model, m, step)
                    group.wait(0)
                    optimizer._core.saving.capture(CopyPool())
                else:
                    _step(optimizer, model, m, step)
            assert optimizer.pending_steps == 0 and optimizer.status.versions == (3,)
            return _flat(anchor(optimizer, model))

    through, broken_off = (_run(1, lambda *a, i=i: replica(*a, i)) for i in (False, True))
    assert torch.equal(through[0], broken_off[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("decided", [True, False], ids=["decided", "undecided"])
def test_an_interrupted_sync_loses_no_step(decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    method = StreamingDiLoCo(sync_every=100, delay=0, fragments=Strided(n=2))

    def replica(m: int, model: nn.Module, group: ReplicaGroup, interrupts: bool) -> Tensor:
        waits = iter([True, True])  # for what is outstanding of the two fragments before: nothing

        def interrupted(self: OuterStep, index: int, timeout_s: float | None = None) -> bool:
            for nothing in waits:
                return nothing
            if decided:
                group.wait(index)
            raise KeyboardInterrupt

        with _start(method, model, group) as optimizer:
            for step in range(6):
                _step(optimizer, model, m, step)
                if step == 3 and interrupts:
                    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                        patch.setattr(OuterStep, "_wait", interrupted)
                        optimizer.sync()
                    optimizer._core.saving.capture(CopyPool())
                if step % 2:
                    optimizer.sync()
            assert optimizer.pending_steps == 0 and optimizer.status.versions == (3, 3)
            return _flat(anchor(optimizer, model))

    through, broken_off = (_run(1, lambda *a, i=i: replica(*a, i)) for i in (False, True))
    assert torch.equal(through[0], broken_off[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("sent", [True, False], ids=["sent", "not sent"])
def test_nobody_waits_for_a_proposal_that_was_interrupted(sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = LoopThread.soon

    def interrupted(self: LoopThread, call: Callable[..., object], *arguments: object) -> bool:
        if not any(isinstance(each, Contribution) for each in arguments):
            return soon(self, call, *arguments)
        if sent:
            soon(self, call, *arguments)
        raise KeyboardInterrupt

    def replica(m: int, model: nn.Module, group: ReplicaGroup) -> bool:
        with _start(DiLoCo(sync_every=2), model, group) as optimizer:
            _step(optimizer, model, m, 0)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(LoopThread, "soon", interrupted)
                _step(optimizer, model, m, 1)
            for step in range(2, 6):
                _step(optimizer, model, m, step)
            return optimizer.sync() and optimizer.pending_steps == 0 and optimizer.inner_step == 6

    assert _run(1, replica) == [True]


def test_a_sync_that_stays_undecided_waits_once_and_what_it_offered_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reduce, goes_on = Reduction.reduce, threading.Event()

    def reduces_late(self: Reduction, attempt: AttemptView, collective: Collective) -> str:
        assert goes_on.wait(60.0)
        return reduce(self, attempt, collective)

    monkeypatch.setattr(Reduction, "reduce", reduces_late)

    def replica(m: int, model: nn.Module, group: ReplicaGroup) -> tuple[int, list[bool], int]:
        waited = list[int]()

        def cut_off(self: OuterStep, index: int, timeout_s: float | None = None) -> bool:
            waited.extend([index] if group.outstanding(index) else [])
            return not group.outstanding(index)

        with _start(DiLoCo(sync_every=100), model, group) as optimizer:
            _step(optimizer, model, m, 0)
            with monkeypatch.context() as patch:
                patch.setattr(OuterStep, "_wait", cut_off)
                decided = [optimizer.sync()]
            _step(optimizer, model, m, 1)
            goes_on.set()
            decided.append(optimizer.sync())
            assert optimizer.pending_steps == 0
            return len(waited), decided, optimizer.inner_step

    assert _run(1, replica) == [(1, [False, True], 2)]


def test_a_sync_copies_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "copy", lambda *_: pytest.fail("a copy"))

    def replica(m: int, model: nn.Module, group: ReplicaGroup) -> bool:
        with _start(DiLoCo(sync_every=100), model, group) as optimizer:
            _step(optimizer, model, m, 0)
            return optimizer.sync()

    assert _run(2, replica) == [True, True]


def test_with_delay_parameters_that_are_not_finite_are_given_up_at_once() -> None:
    def replica(m: int, model: nn.Module, group: ReplicaGroup) -> list[bool]:
        finite = []
        with _start(DELAYED, model, group) as optimizer:
            for step in range(6):
                _step(optimizer, model, m, step, scale=float("nan") if step == 3 else 1.0)
                finite.append(all(bool(p.isfinite().all()) for p in model.parameters()))
        return finite

    assert _run(1, replica) == [[True] * 6]


def test_a_method_that_is_due_by_more_than_its_period_is_asked_at_each_step() -> None:
    assert LocalSGD(sync_every=8).timing.fixed_period == DiLoCo(sync_every=8).timing.fixed_period == 8
    assert LocalSGD(sync_every=8, trigger=Every(2)).timing.fixed_period is None
    assert LocalSGD(sync_every=8, average_until_step=2).timing.fixed_period is None
    assert LocalSGD(pacing=BySpeed(round_steps=8)).timing.fixed_period is None


def test_scalars_of_a_subclass_may_look_at_tensors() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Longer(SlowMo):
        def scalars(self, view: ReplicaView) -> tuple[float, ...]:
            return (view.lr, float(view.params.norm()))

    assert not reads_tensors(SlowMo(sync_every=8)) and reads_tensors(Longer(sync_every=8))
