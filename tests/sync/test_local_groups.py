"""Groups of one process of which only some are used: the log says for whom the others wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ftopt
from ftopt.sync import local
from tests.optimizer.running import together


def train(group: ftopt.ReplicaGroup) -> None:
    model = nn.Linear(2, 1)
    with ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.LocalSGD(sync_every=1), group=group) as o:
        model(torch.ones(1, 2)).sum().backward()
        o.step()


def test_groups_that_are_not_used_are_named_while_the_others_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_PATIENCE_S", 0.01)
    train(ftopt.local_groups(3, policy=ftopt.FaultPolicy(start_s=1.0))[1])
    assert caplog.text.count("the job waits for") == 1
    assert "waits for r0, r2, 1 s at most (policy.start_s)" in caplog.text
    assert "FaultPolicy(start_replicas=1)" in caplog.text


def test_jobs_that_start_at_once_or_with_all_in_time_say_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = ftopt.local_groups(3)
    together([lambda group=group: train(group) for group in groups])
    monkeypatch.setattr(local, "_PATIENCE_S", 0.01)
    train(ftopt.solo())
    train(ftopt.local_groups(3, policy=ftopt.FaultPolicy(start_replicas=1))[0])
    assert "waits for" not in caplog.text
