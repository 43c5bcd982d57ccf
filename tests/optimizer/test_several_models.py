"""Several models in one process: each has a group, a job and an optimizer of its own."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.events import Event


def wrapped(model: nn.Module, group: Any) -> ftopt.ReplicaOptimizer:
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.LocalSGD(sync_every=2), group=group)


def step(model: nn.Module, optimizer: ftopt.ReplicaOptimizer) -> None:
    model(torch.ones(3, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("started", [False, True])
def test_one_group_for_two_models_is_refused_by_wrap(started: bool) -> None:
    group, models = ftopt.solo(), [nn.Linear(4, 2) for _ in range(2)]
    first = wrapped(models[0], group)
    if started:
        step(models[0], first)
    with pytest.raises(UserError, match="connect once for each model, with a job of its own"):
        wrapped(models[1], group)
    step(models[0], first)
    first.close()
    assert first.local_steps == 1 + started


def test_a_group_whose_optimizer_has_left_is_refused_by_wrap() -> None:
    group, model = ftopt.solo(), nn.Linear(4, 2)
    optimizer = wrapped(model, group)
    step(model, optimizer)
    optimizer.close()
    with pytest.raises(UserError, match="or was closed"):
        wrapped(model, group)


def test_an_optimizer_that_has_not_started_may_be_made_again() -> None:
    group, model = ftopt.solo(), nn.Linear(4, 2)
    optimizer = wrapped(model, group)
    optimizer = wrapped(model, group)  # as in a notebook's cell that is run again
    with optimizer:
        step(model, optimizer)
    assert optimizer.local_steps == 1


def test_the_group_of_an_optimizer_that_is_gone_without_a_start_is_free() -> None:
    group = ftopt.solo()
    wrapped(nn.Linear(4, 2), group)
    gc.collect()
    model = nn.Linear(4, 2)
    with wrapped(model, group) as optimizer:
        step(model, optimizer)


def test_two_models_train_in_turn_with_a_group_each() -> None:
    models = [nn.Linear(4, 2) for _ in range(2)]
    optimizers = [wrapped(model, ftopt.solo()) for model in models]
    with optimizers[0], optimizers[1]:
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer)
    assert [optimizer.status.versions for optimizer in optimizers] == [(2,), (2,)]


def test_the_log_names_the_job_where_a_process_takes_part_in_several(caplog: pytest.LogCaptureFixture) -> None:
    from ftopt._connect import _Log

    alone = _Log("10.0.0.1", "first")
    alone(Event("hold", "r0", data={"text": "1 of 2 replicas connected"}))
    other = _Log("10.0.0.1", "second")
    with caplog.at_level(logging.INFO, "ftopt"):
        for log in (alone, other):
            log(Event("hold", "r0", data={"text": "all 2 replicas are connected"}))
            log(Event("fetched", "r0", data={"bytes": 50_000_000, "seconds": 0.5}))
        del log, other
        gc.collect()
        alone(Event("hold", "r0", data={"text": "1 of 2 replicas connected"}))
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(": ")[0] for text in told] == [
        "r0", "first/r0", "replica first/r0", "second/r0", "replica second/r0", "r0"
    ]  # fmt: skip
