"""Steps that are dropped have not moved the job: schedulers go back to the rates of its inner step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.optim.lr_scheduler as lrs
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import ftopt
from ftopt import local_groups
from ftopt.checkpoint.reader import whole
from ftopt.optimizer.schedules import Schedules
from ftopt.optimizer.torch_schedulers import counted
from ftopt.step.inner import Inner
from tests.optimizer.running import PATIENT
from tests.optimizer.test_schedules import SCHEDULERS, TASK, Loop, Make, alone


def rates(optimizer: Optimizer) -> tuple[float, tuple[float, float]]:
    group = optimizer.param_groups[0]
    return group["lr"], group["betas"]


def steps_of_a_job(make: Callable[[Optimizer], list[LRScheduler]], steps: list[int]) -> list[tuple[int, object]]:
    """The rates of each local step, where the job is at ``steps``."""
    inner = TASK.inner(TASK.model(0).parameters())
    schedules, schedulers, taken = Schedules(), make(inner), []
    for local, at in enumerate(steps):
        schedules.follow(object(), Inner([inner]), "r0", start_step=0, local_steps=local, inner_step=at)
        taken.append((at, rates(inner)))
        inner.step()
        for each in schedulers:
            each.step()
    return taken


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULERS if kind != "by the job's step"])
def test_the_rates_after_dropped_steps_are_those_of_before(kind: str) -> None:
    make: Callable[[Optimizer], list[LRScheduler]] = SCHEDULERS[kind]  # type: ignore[assignment]
    whole = dict(steps_of_a_job(make, [*range(30)]))
    for at, found in steps_of_a_job(make, [*range(12), *range(4, 14), 13, 14, 15, *range(24, 30)]):
        assert found == whole[at], at


def test_one_that_counts_epochs_stays_and_one_of_steps_goes_back() -> None:
    inner = TASK.inner(TASK.model(0).parameters())
    schedules, steps, epochs = Schedules(), lrs.LinearLR(inner, 0.1, total_iters=15), lrs.ExponentialLR(inner, 0.5)
    for local, at in enumerate([*range(20), *range(12, 15)]):
        schedules.follow(object(), Inner([inner]), "r0", start_step=0, local_steps=local, inner_step=at)
        inner.step()
        steps.step()
        if local == 17:
            epochs.step()
    assert (counted(steps), counted(epochs)) == (15, 1)


@pytest.mark.parametrize("changed", ["by user code", "by a plateau"])
def test_rates_that_steps_alone_do_not_give_stay_and_are_named(changed: str, caplog: pytest.LogCaptureFixture) -> None:
    inner = TASK.inner(TASK.model(0).parameters())
    schedules, steps = Schedules(), lrs.ExponentialLR(inner, 0.9)
    plateau = lrs.ReduceLROnPlateau(inner, patience=0)
    for local, at in enumerate([*range(12), *range(8, 12), *range(10, 12)]):
        schedules.follow(object(), Inner([inner]), "r0", start_step=0, local_steps=local, inner_step=at)
        inner.step()
        steps.step()
        if local == 5 and changed == "by user code":
            inner.param_groups[0]["lr"] *= 0.5
        if changed == "by a plateau":
            plateau.step(float(local > 3))
    assert counted(steps) == 18
    assert caplog.text.count("r0: ExponentialLR stays 4 steps ahead of the job") == 1


class OfItsCalls(lrs.LambdaLR):
    """Its rates come from calls, not from its count."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.calls = 0
        super().__init__(optimizer, float)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.calls += 1
        return [base * 0.9**self.calls for base in self.base_lrs]


class InContainers(lrs.LRScheduler):
    """Its own count is in a container."""

    def __init__(self, optimizer: Optimizer, kind: str) -> None:
        self.kept = {"a dict": {"calls": 0.0}, "a list": [[0.0]], "a tensor": torch.zeros(())}[kind]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        match self.kept:
            case {"calls": calls}:
                self.kept["calls"] = times = calls + 1
            case [[calls]]:
                self.kept[0][0] = times = calls + 1
            case _:
                times = float(self.kept.add_(1))
        return [base * 0.9**times for base in self.base_lrs]


@pytest.mark.parametrize("kind", ["a dict", "a list", "a tensor"])
def test_one_that_cannot_go_back_is_as_before_until_the_job_has_come_there(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    taken = steps_of_a_job(
        lambda optimizer: [InContainers(optimizer, kind)], [*range(12), *range(4, 8), *range(16, 20)]
    )
    whole = steps_of_a_job(lambda optimizer: [InContainers(optimizer, kind)], [*range(20)])
    assert [found for _, found in taken] == [found for _, found in whole]
    assert len(caplog.messages) == 1 and "InContainers stays 8 steps ahead of the job" in caplog.text


def forward_only() -> Callable[[int], float]:
    """A function of the step that cannot be asked for an earlier one."""
    steps: Iterator[int] = iter(range(13))
    return lambda _: 0.9 ** next(steps)


@pytest.mark.parametrize("kind", ["dampened", "of its calls", "that raises"])
def test_a_lambdas_rates_that_its_count_does_not_give_stay(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """As of a warmup that dampens the rates after each step of the scheduler."""
    inner = TASK.inner(TASK.model(0).parameters())
    make = {"of its calls": OfItsCalls, "that raises": lambda optimizer: lrs.LambdaLR(optimizer, forward_only())}
    scheduler = make.get(kind, lambda optimizer: lrs.LambdaLR(optimizer, lambda step: 1 / (1 + step)))(inner)
    schedules = Schedules()
    for local in range(12):
        schedules.follow(object(), Inner([inner]), "r0", start_step=0, local_steps=local, inner_step=local)
        inner.step()
        scheduler.step()
        if kind == "dampened":
            inner.param_groups[0]["lr"] *= local / 100
    before = rates(inner)
    for _ in range(2):
        schedules.follow(object(), Inner([inner]), "r0", start_step=0, local_steps=12, inner_step=8)
    assert (rates(inner), counted(scheduler)) == (before, 12)
    assert caplog.text.count("r0: ") == 1 and "stays 4 steps ahead of the job" in caplog.text


@pytest.mark.parametrize("kind", ["cosine", "two in turns"])
def test_a_replica_whose_steps_are_dropped_goes_on_at_the_jobs_rates(kind: str) -> None:
    make: Make = SCHEDULERS[kind]
    loop = Loop(local_groups(1, policy=PATIENT)[0], make)
    with loop.optimizer:
        loop.build()
        for _ in range(8):
            loop.step()
        with torch.no_grad():
            next(iter(loop.model.parameters())).fill_(math.nan)
        while loop.optimizer.inner_step < 16:
            loop.taken.pop(loop.optimizer.inner_step, None)  # of a step that was dropped
            loop.step()
    assert loop.optimizer.local_steps > 16, "some steps were dropped"
    whole = alone(make, 16)
    assert {at: loop.taken[at] for at in whole} == whole
    at = loop.optimizer.inner_step
    assert [counted(each) for each in loop.schedulers] == [at] * len(loop.schedulers)


@pytest.mark.parametrize("saved", ["before the scheduler's step", "after it"])
def test_a_checkpoint_has_schedules_at_the_jobs_inner_step(
    saved: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Mixing discards a part of the overlapped steps. A resumed replica goes on with the same rates, if its checkpoint
    was made after the scheduler's step; else it lacks one."""
    method = ftopt.StreamingDiLoCo(sync_every=6, fragments=ftopt.fragments.Strided(n=2), delay=4, mix=0.5)
    taken = dict[int, set[float]]()
    for resumed in (False, True):
        (group,) = local_groups(1, policy=PATIENT)
        model = TASK.model(0)
        optimizer = ftopt.wrap(TASK.inner(model.parameters()), model, method, group=group)
        checkpoints = ftopt.Checkpoints(tmp_path / str(resumed), optimizer, every=1, keep=50)
        if resumed:
            checkpoints.resume(whole(tmp_path / "False")[1])
        with optimizer:
            scheduler = lrs.CosineAnnealingLR(optimizer, 40)
            checkpoints.include(scheduler=scheduler)
            while optimizer.local_steps < 24:
                optimizer.zero_grad()
                TASK.backward(model, 0, optimizer.local_steps)
                at = optimizer.inner_step
                optimizer.step()
                taken.setdefault(at, set()).add(optimizer.param_groups[0]["lr"])
                if saved == "after it":
                    scheduler.step()
                checkpoints.step()
                assert checkpoints._writer.wait(30)
                if saved != "after it":
                    scheduler.step()
            assert counted(scheduler) < 24, "some steps were mixed away"
        checkpoints.close()
    assert saved != "after it" or all(len(each) == 1 for each in taken.values())
    assert "does not count inner steps" not in caplog.text
