"""What goes wrong in one of PAFT's replicas between two averages is gone after the next ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ftopt
from ftopt._connect import local_groups
from tests.optimizer.running import PATIENT, together
from tests.problems import flat, problem
from tests.step.outer.test_alike import flip

Strike = Callable[[nn.Module, torch.optim.Optimizer], None]


def run(strike: Strike, *, replicas: int, delay: int, steps: int = 68) -> list[torch.Tensor]:
    """An average every tenth step; r1 is struck after step 43."""
    task, groups = problem("mlp", "adamw"), local_groups(replicas, policy=PATIENT)

    def replica(m: int) -> torch.Tensor:
        model = task.model(0)
        inner = task.inner(model.parameters())
        outer = ftopt.wrap(inner, model, ftopt.PAFT(sync_every=10, delay=delay), group=groups[m])
        with outer:
            for step in range(steps):
                if (m, step) == (1, 43):
                    strike(model, inner)
                outer.zero_grad()
                task.backward(model, m, step)
                outer.step()
            outer.sync(propose=False)
            return flat(model)

    return together([lambda m=m: replica(m) for m in range(replicas)])


@pytest.mark.parametrize(("bit", "replicas", "delay"), [(22, 2, 0), (22, 3, 1), (30, 2, 1), (30, 3, 0)])
def test_a_flipped_bit_of_a_parameter(bit: int, replicas: int, delay: int) -> None:
    held = run(lambda model, inner: flip(next(model.parameters()), bit), replicas=replicas, delay=delay)
    assert all(bool((each.abs() < 10).all()) for each in held)
    assert max(float((each - held[0]).abs().max()) for each in held) <= 0.02


@pytest.mark.parametrize("delay", [0, 1])
def test_parameters_that_are_no_numbers(delay: int) -> None:
    def strike(model: nn.Module, inner: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)

    held = run(strike, replicas=3, delay=delay)
    assert all(bool(torch.isfinite(each).all()) for each in held)
    assert max(float((each - held[0]).abs().max()) for each in held) <= 0.02
