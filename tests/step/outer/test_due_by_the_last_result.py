"""A trigger that reads the last outer step's statistics is asked with the newest: whether a result comes before a
boundary, within it, or is awaited there, a replica proposes at the same step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import ftopt
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView
from ftopt.sync.group import Contribution
from ftopt.triggers import Due, Progress, Trigger
from tests.optimizer.scripted import Scripted

ARRIVES = ["before", "within", "awaited"]


@dataclass(frozen=True)
class ByLastResult(Trigger):
    """Due after ``first`` steps, and after ``then`` once there was an outer step."""

    first: int
    then: int
    uses = ftopt.triggers.Measurement.PACE

    def due(self, progress: Progress) -> Due:
        return Due.YES if progress.steps >= (self.then if progress.agreed.members else self.first) else Due.NO


class Timed(Scripted):
    """The first contribution is decided when ``arrives`` says, at the boundary after it."""

    def __init__(self, arrives: str) -> None:
        super().__init__(random.Random(0), 4)
        self.arrives, self.at_boundary, self.proposed_at = arrives, False, list[int]()

    def propose(self, contribution: Contribution, *, now: bool = False) -> None:
        self.proposed_at.append(contribution.last_step)
        super().propose(contribution, now=now)

    def called_in(self, fragment: int) -> bool:
        if self.arrives == "within" and self.at_boundary:  # after the trigger was asked
            self.commit()
        return False

    def wait(self, fragment: int, *, timeout_s: float | None = None) -> bool:
        if self.arrives == "awaited":
            self.commit()
        return super().wait(fragment, timeout_s=timeout_s)


@pytest.mark.parametrize(("first", "then", "proposes"), [(2, 1, [2, 3]), (1, 2, [1, 3])])
def test_a_result_counts_for_the_boundary_at_which_it_is_applied(first: int, then: int, proposes: list[int]) -> None:
    found = {arrives: proposals(arrives, ByLastResult(first, then)) for arrives in ARRIVES}
    assert found == dict.fromkeys(ARRIVES, proposes)


def proposals(arrives: str, trigger: Trigger) -> list[int]:
    model, group = nn.Linear(3, 1), Timed(arrives)
    method = ftopt.StreamingDiLoCo(
        sync_every=4, delay=1, fragments=ftopt.fragments.Balanced(n=1), wait_for_result_s=60.0, trigger=trigger
    )
    outer = OuterStep([FlatView(model)], method, group)  # type: ignore[arg-type]
    group.start(outer.reduction, None)  # type: ignore[arg-type]
    for step in range(1, 4):
        with torch.no_grad():
            model.weight.add_(1.0)
        group.work[step] = torch.ones(4)
        outer.counters.count_step(0, None)
        second = len(group.proposed_at) == 1
        if second and arrives == "before":
            group.commit()
        group.at_boundary = second
        outer.boundary(lambda: 0.1)
        group.at_boundary = False
    return group.proposed_at
