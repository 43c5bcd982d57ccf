"""`ReplicaOptimizer.passed`: what a loop does every so many inner steps of the job."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.optimizer import ReplicaOptimizer
from tests.optimizer.running import patient_solo


def wrapped() -> ReplicaOptimizer:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=1000), group=patient_solo())


def at(optimizer: ReplicaOptimizer, monkeypatch: pytest.MonkeyPatch, inner_step: int, start_step: int = 0) -> None:
    """Its inner step is that, for whatever reason."""
    from ftopt.optimizer.core import Core, Standing

    standing = Standing(started=True, start_step=start_step, inner_step=inner_step)
    monkeypatch.setattr(Core, "standing", lambda core: standing)


def test_each_multiple_is_passed_once_however_the_inner_step_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, passed = wrapped(), []
    for step in (0, 99, 101, 102, 199, 286, 301, 302, 610, 605, 611):
        at(optimizer, monkeypatch, step)
        if optimizer.passed(every=100):
            passed.append(step)
    assert passed == [101, 286, 301, 610]


def test_who_joins_passes_no_multiple_before_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, passed = wrapped(), []
    for step in (300, 301, 399, 400, 401):
        at(optimizer, monkeypatch, step, start_step=300)
        if optimizer.passed(every=100):
            passed.append(step)
    assert passed == [400]


def test_each_line_and_each_value_of_every_is_a_question_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = wrapped()
    at(optimizer, monkeypatch, 100)
    evaluates = optimizer.passed(every=100)
    saves = optimizer.passed(every=100)
    assert evaluates and saves
    assert [optimizer.passed(every=every) for every in (50, 100, 200, 50)] == [True, True, False, False]


def test_a_loop_counts_by_the_steps_that_it_takes() -> None:
    optimizer, passed = wrapped(), []
    assert not optimizer.passed(every=2)
    with optimizer:
        model = optimizer._core.model
        assert model is not None
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if optimizer.passed(every=2):
                passed.append(optimizer.inner_step)
    assert passed == [2, 4]


def test_a_multiple_that_is_passed_again_after_steps_were_dropped_is_not_passed_twice() -> None:
    optimizer, passed, seen = wrapped(), list[int](), list[int]()
    with optimizer:
        model, outer = optimizer._core.model, optimizer._core.started()
        assert model is not None
        for _ in range(12):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            seen.append(optimizer.inner_step)
            if optimizer.passed(every=2):
                passed.append(optimizer.inner_step)
            if optimizer.local_steps == 5:
                outer._applier.drop(outer.fragments[0], outer.fragments[0].start, "outlier")
    assert seen == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]
    assert passed == [2, 4, 6]


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "100", None])
def test_a_period_that_is_no_whole_number_is_refused(every: object) -> None:
    with pytest.raises(UserError, match=r"every=.*; must be a whole number of inner steps, at least 1"):
        wrapped().passed(every=every)  # type: ignore[arg-type]
