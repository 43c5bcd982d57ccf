"""An agreed gradient that is applied outside of the user's ``step()`` leaves no gradient behind: the next backward pass
would add to it, and the step would count twice."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.methods import Method
from tests.optimizer.running import together


def model() -> nn.Linear:
    made = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(made.weight)
    return made


@pytest.mark.parametrize("propose", [False, True])
@pytest.mark.parametrize("own", [None, 7.0])
@pytest.mark.parametrize("method", [ftopt.SyncSGD(), ftopt.PAFT(sync_every=10)], ids=["sync_sgd", "paft"])
def test_a_step_that_is_taken_in_another_call_keeps_the_gradients_at_hand(
    method: Method, own: float | None, propose: bool
) -> None:
    groups = ftopt.local_groups(
        2, policy=ftopt.FaultPolicy(start_replicas=1, min_replicas=2, grace_s=0.1, dead_after_s=60.0)
    )
    models = [model(), model()]
    optimizers = [
        ftopt.wrap(torch.optim.SGD(each.parameters(), lr=1.0), each, method, group=group)
        for each, group in zip(models, groups, strict=True)
    ]
    stepped = threading.Event()

    def gradient(value: float) -> Tensor:
        return torch.full((1, 3), value)

    def first() -> None:
        weight = models[0].weight
        with optimizers[0] as optimizer:
            weight.grad = gradient(2.0)
            optimizer.step()  # too few replicas: it is pending, and this replica trains on
            weight.grad = None if own is None else gradient(own)
            stepped.set()
            while not optimizer.status.versions[0]:
                optimizer.sync(propose=propose)
            optimizer.sync(propose=False)  # it may have been decided behind the last call
            found = weight.grad
            assert torch.equal(weight.detach(), -gradient(3.0))  # the mean of 2 and 4
            assert found is None if own is None else torch.equal(found, gradient(own))  # type: ignore[arg-type]
            optimizer.zero_grad()

    def second() -> None:
        assert stepped.wait(30.0)
        with optimizers[1] as optimizer:
            assert models[1].weight.grad is None
            models[1].weight.grad = gradient(4.0)
            optimizer.step()
            while not optimizer.status.versions[0]:
                optimizer.sync(propose=False)

    together([first, second])
