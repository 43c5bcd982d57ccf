"""``pacing=BySpeed()`` in training: replicas of unlike speed, each with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from torch import nn

from ftopt._connect import local_groups, solo
from ftopt.events import Event
from ftopt.methods import BySpeed, DiLoCo, LocalSGD, Method
from ftopt.optimizer import wrap
from ftopt.outer import SGD
from ftopt.step.outer.counters import StepTotals
from tests.optimizer.running import PATIENT, together
from tests.problems import problem
from tests.reference import balanced

TASK = problem("linear", "sgd")


@dataclass
class Ran:
    """Of one replica: its steps and its own seconds in each round, and what is pending at the end."""

    rounds: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    local_steps: int = 0
    pending: int = 0


def run(
    method: Method, step_s: Callable[[int, int], float], *, replicas: int, rounds: int, leaves: int | None = None
) -> tuple[list[Ran], list[Event]]:
    """Trains replicas on clocks that stand still but for the steps; the last one leaves after ``leaves`` rounds."""
    models: list[nn.Module] = [TASK.model(0) for _ in range(replicas)]
    told: list[Event] = []
    groups = local_groups(replicas, policy=PATIENT, on_event=told.append)

    def replica(m: int) -> Ran:
        ran, now = Ran(), [0.0]
        optimizer = wrap(TASK.inner(models[m].parameters()), models[m], method, group=groups[m])
        optimizer._core.training.clock = lambda: now[0]
        mine = leaves if leaves is not None and m == replicas - 1 else rounds
        with optimizer:
            began, before = 0.0, 0
            while len(ran.rounds) < mine:
                optimizer.zero_grad()
                TASK.backward(models[m], m, optimizer.local_steps)
                now[0] += step_s(m, len(ran.rounds))
                optimizer.step()
                if optimizer.status.versions[0] > len(ran.rounds):
                    ran.rounds.append(optimizer.local_steps - before)
                    ran.seconds.append(now[0] - began)
                    began, before = now[0], optimizer.local_steps
            ran.local_steps, ran.pending = optimizer.local_steps, optimizer.pending_steps
        return ran

    return together([lambda m=m: replica(m) for m in range(replicas)]), told  # type: ignore[misc]


@pytest.mark.parametrize(
    "method",
    [
        LocalSGD(pacing=BySpeed(round_steps=60)),
        DiLoCo(pacing=BySpeed(round_steps=60), outer=SGD(lr=0.7)),
    ],
    ids=["local_sgd", "diloco"],
)
def test_replicas_of_unlike_speed_arrive_within_a_step_and_are_weighted_by_their_steps(method: Method) -> None:
    speeds = (0.01, 0.02, 0.05)
    ran, told = run(method, lambda m, number: speeds[m], replicas=3, rounds=6)
    expected = balanced.rounds([range(3)] * 6, lambda m, number: speeds[m], 60, 6)
    assert [x.rounds for x in ran] == [[round(steps[m]) for steps in expected] for m in range(3)]
    assert [x.rounds[0] for x in ran] == [6, 6, 6]
    for number in range(2, 6):
        arrivals = [x.seconds[number] for x in ran]
        assert max(arrivals) - min(arrivals) <= max(speeds), "within one step of the slowest"
        assert abs(sum(x.rounds[number] for x in ran) - 60) <= 1
    decisions = [event for event in told if event.event == "decide"]
    assert len(decisions) >= 6
    counted: dict[str, int] = {}
    for event in decisions:
        for name, _, steps, last_step, weight, _ in event.data["members"]:
            assert weight == steps
            counted[name] = counted.get(name, 0) + steps
            assert counted[name] == last_step, "each step once"
    assert sorted(counted.values()) == sorted(x.local_steps for x in ran)
    assert [x.pending for x in ran] == [0, 0, 0]


def test_what_happens_between_two_steps_is_the_steps_and_an_outer_step_is_not() -> None:
    now = [0.0]

    def on_event(event: Event) -> None:
        now[0] += {"stepped": 0.25, "reduce": 50.0, "apply": 7.0}.get(event.event, 0.0)

    model = TASK.model(0)
    group = solo(on_event=on_event)
    method = LocalSGD(pacing=BySpeed(round_steps=30))
    optimizer = wrap(TASK.inner(model.parameters()), model, method, group=group)
    optimizer._core.training.clock = lambda: now[0]
    with optimizer:
        for step in range(36):
            TASK.backward(model, 0, step)
            now[0] += 0.75
            optimizer.step()
            if step == 4:
                with optimizer.busy("evaluating"):
                    now[0] += 100.0
        outer = optimizer._core.started()
        assert optimizer.status.versions == (2,), "after 3 and 33 steps"
        assert outer.counters.totals.pace(StepTotals()) == pytest.approx(1.0)


def test_a_replica_that_becomes_slower_has_fewer_steps_in_the_round_after() -> None:
    ran, _ = run(
        LocalSGD(pacing=BySpeed(round_steps=100)),
        lambda m, number: 0.03 if m == 1 and number >= 3 else 0.01,
        replicas=2,
        rounds=6,
    )
    assert [x.rounds for x in ran] == [[10, 50, 50, 50, 75, 75], [10, 50, 50, 50, 25, 25]]


def test_the_steps_of_a_round_stay_the_same_when_a_replica_leaves() -> None:
    ran, _ = run(LocalSGD(pacing=BySpeed(round_steps=90)), lambda m, number: 0.01, replicas=3, rounds=7, leaves=3)
    assert ran[2].rounds == [9, 30, 30]
    assert [x.rounds for x in ran[:2]] == [[9, 30, 30, 30, 45, 45, 45]] * 2
    assert all(a <= b for a, b in pairwise(sum(x.rounds[n] for x in ran[:2]) for n in range(7)))
