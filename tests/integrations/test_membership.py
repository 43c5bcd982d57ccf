"""What all callbacks do for a trainer, without one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

import ftopt
from ftopt._connect import local_groups
from ftopt.errors import UserError
from ftopt.integrations.membership import Membership
from tests.optimizer.running import PATIENT


def wrapped(group: ftopt.ReplicaGroup, *, seed: int) -> ftopt.ReplicaOptimizer:
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=1000), group=group)


@pytest.mark.parametrize("runs", [True, False], ids=["a job that runs", "a new job"])
def test_a_trainer_that_resumes_its_own_checkpoint_is_refused_by_a_new_job_only(
    runs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    there, comes = local_groups(2, policy=replace(PATIENT, start_replicas=1))
    first = wrapped(there, seed=1)
    if runs:
        first.__enter__()
    optimizer = wrapped(comes, seed=2)
    membership = Membership(optimizer, None)
    membership.join([], None, planned=0)
    if runs:
        membership.check_resumed(30, new="", old="")
        assert "the trainer resumes at step 30, and the job stands at step 0" in caplog.text
        membership.fail()
        first.close(flush=False)
    else:
        with pytest.raises(UserError, match="resumes at step 30, and the job begins at step 0"):
            membership.check_resumed(30, new="", old="")
    there.close()
    assert membership.over


@pytest.mark.parametrize("kind", ["lambda", "exponential"])
def test_the_trainers_schedule_goes_back_with_steps_that_have_not_moved_the_parameters(kind: str) -> None:
    """A pass whose gradient waits; steps that are dropped; a leap of the job."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    lrs = torch.optim.lr_scheduler
    scheduler = lrs.LambdaLR(inner, lambda at: 0.5**at) if kind == "lambda" else lrs.ExponentialLR(inner, 0.5)
    job = SimpleNamespace(optimizer=SimpleNamespace(inner_step=0), _stay_ahead=False)
    for at in (1, 2, 2, 2, 5, 3, 0, 1):
        inner.step()
        scheduler.step()
        job.optimizer.inner_step = at
        Membership.follow(cast(Membership, job), [scheduler])
        assert (scheduler.last_epoch, inner.param_groups[0]["lr"]) == (at, 0.5**at)
    inner.param_groups[0]["lr"] = 0.3
    job.optimizer.inner_step = 0
    Membership.follow(cast(Membership, job), [scheduler])
    assert job._stay_ahead and (scheduler.last_epoch, inner.param_groups[0]["lr"]) == (1, 0.3)
