"""Replicas that take every step alike take each agreed gradient at the rate that the loop has set for its inner step,
also one whose thread was away, or that has fetched."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import ftopt
from tests.optimizer.running import together
from tests.problems import seeded

METHODS = pytest.mark.parametrize("method", [ftopt.SyncSGD(), ftopt.PAFT(sync_every=1000)], ids=["sync_sgd", "paft"])
TOO_FEW = ftopt.Sync(start_replicas=1, min_replicas=2, grace_s=60.0, dead_after_s=60.0)


class Replica:
    """One replica, whose loop sets the rate by the job's inner step."""

    def __init__(self, group: object, method: ftopt.Method) -> None:
        with seeded():
            self.model = nn.Linear(3, 1, bias=False)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = ftopt.wrap(inner, self.model, method, group=group)  # type: ignore[arg-type]

    def step(self) -> None:
        """A turn of the loop."""
        self.optimizer.param_groups[0]["lr"] = 1 / (1 + self.optimizer.inner_step)
        self.model.weight.grad = torch.ones(1, 3)
        self.optimizer.step()

    @property
    def weight(self) -> Tensor:
        return self.model.weight.detach().clone()


@METHODS
def test_a_replica_that_was_away_takes_two_agreed_gradients_in_two_steps(method: ftopt.Method) -> None:
    away, back = [Replica(group, method) for group in ftopt.local_groups(2, sync=TOO_FEW)]
    proposed, decided, compared = threading.Event(), threading.Event(), threading.Barrier(2, timeout=30.0)

    def first() -> Tensor:
        with away.optimizer as optimizer:
            away.step()  # too few replicas: it is pending, and this replica trains on
            assert optimizer.pending_steps == 1
            proposed.set()
            assert decided.wait(30.0)  # version 1, behind it
            while optimizer.inner_step < 2:
                away.step()
            found = away.weight
            compared.wait()
            return found

    def second() -> Tensor:
        assert proposed.wait(30.0)
        with back.optimizer as optimizer:
            back.step()
            assert optimizer.versions[0] == 1
            decided.set()
            back.step()
            assert optimizer.versions[0] == 2
            found = back.weight
            compared.wait()
            return found

    ours, theirs = together([first, second])
    assert torch.equal(ours, theirs)
