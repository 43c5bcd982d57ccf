"""A replica that the coordinator sends home, or keeps out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import Refused
from ftopt.sync.protocol.replica.effects import GiveUp
from tests.run.running import until


def test_who_is_sent_home_does_not_connect_again() -> None:
    """Else it is told the same again, and as a newcomer, until its training thread has closed the optimizer."""
    group, optimizer = replica()
    with pytest.raises(Refused, match="the job has ended"), optimizer:
        session = group.session
        session.network.soon(session.run, [GiveUp("the job has ended")])
        session.network.soon(session.connection.hang_up)
        until(lambda: session._tasks[0].done())
        optimizer.step()


def test_a_coordinator_that_does_not_let_it_in_is_not_called_away() -> None:
    group, optimizer = replica()
    with optimizer:
        session = group.session
        session.machine.welcomed = False  # as after a lost connection
        found = []
        for session.connection.kept_out in ("", "waiting for r1"):
            found.append(group.obstacle())
        assert found == ["no coordinator answers", "a coordinator answers, and does not let it in (waiting for r1)"]
        session.machine.welcomed = True


def replica() -> tuple[Any, ftopt.ReplicaOptimizer]:
    (group,) = ftopt.local_groups(1)
    model = nn.Linear(2, 1)
    return group, ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=2), group=group
    )
