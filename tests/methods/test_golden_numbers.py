"""DiLoCo beside the golden numbers of MaxText's integration test (``tests/integration/diloco_test.py``): two replicas
fit ``y = w x + b`` by plain SGD."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftopt import DiLoCo, local_groups, outer, wrap
from tests.optimizer.running import PATIENT, together

DATA = (
    (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0], [2.0]])),
    (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0], [3.0]])),
)
LOSSES = (1.0, 0.49, 0.2401, 0.207545)
"""Replica 0's, before each of its inner steps; an outer step follows the third. Exact arithmetic ends with
0.2075437."""
WEIGHT, BIAS = (1.5345, 1.0494), 0.5839
"""After the outer step."""


def test_diloco_makes_the_golden_numbers_of_maxtext() -> None:
    groups = local_groups(2, policy=PATIENT)
    method = DiLoCo(sync_every=3, outer=outer.SGD(lr=1.0, momentum=0.9, nesterov=True))

    def replica(m: int) -> tuple[list[float], list[float]]:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[2.0, 1.0]]))
            model.bias.fill_(1.0)
        losses, agreed = [], []
        x, y = DATA[m]
        with wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=groups[m]) as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                if step == 2:
                    agreed = [*model.weight.detach().flatten().tolist(), model.bias.item()]
        return losses, agreed

    (losses, agreed), (_, others) = together([lambda m=m: replica(m) for m in range(2)])
    assert losses == pytest.approx(LOSSES, rel=1e-5)
    assert agreed == others == pytest.approx((*WEIGHT, BIAS), abs=1e-4)
