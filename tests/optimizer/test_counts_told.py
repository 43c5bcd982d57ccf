"""What a script's replica tells of its life: the coordinator's events have it, also where it was never asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ftopt
from ftopt.events import Event
from tests.optimizer.running import PATIENT


@pytest.mark.parametrize("flush", [True, False])
def test_the_event_of_a_replicas_end_has_its_steps_and_waits(flush: bool) -> None:
    events: list[Event] = []
    model = nn.Linear(2, 1)
    group = ftopt.local_groups(1, policy=PATIENT, on_event=events.append)[0]
    optimizer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.LocalSGD(sync_every=4), group=group
    )
    optimizer.__enter__()
    for number in range(10):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if number == 1:
            model.weight.grad = torch.full_like(model.weight, torch.nan)
        optimizer.step()
        if number == 3:
            optimizer.sync(propose=False)
    optimizer.sync(propose=False)
    optimizer.close(flush=flush)
    told = next(x for x in events if x.event == "leave").data["counts"]
    stalls = [x.data["stall_s"] for x in events if x.event == "stall"]
    dropped = sum(x.data["steps"] for x in events if x.event == "discarded")
    in_model = sum(
        steps for x in events if x.event == "decide" for _, _, steps, *_, finite in x.data["members"] if finite
    )
    assert told["steps"] == 10 == in_model + told["pending"] + dropped
    assert told["dropped"] == {"nonfinite": dropped} and dropped
    assert told["waited_s"] == pytest.approx(sum(stalls), abs=0.01)
    assert told["pending"] == (0 if flush else 2)
    assert sum(times for _, times in told["waits"]) == len(stalls)
    assert max(seconds for seconds, _ in told["waits"]) == pytest.approx(max(stalls), rel=0.03, abs=1e-5)
    assert told["planned"] == 0, "this loop is the user's own"


def test_a_loop_over_steps_tells_where_it_ends() -> None:
    events: list[Event] = []
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    [group] = ftopt.local_groups(1, policy=PATIENT, on_event=events.append)
    optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=4), group=group)
    for _ in optimizer.steps(9):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert next(x for x in events if x.event == "leave").data["counts"]["planned"] == 9
