from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import nn

from ftopt.connect import local_groups
from ftopt.events import Event
from ftopt.fragments import Balanced, Named, Sequential, Strided
from ftopt.methods import Parameter, StreamingDiLoCo
from ftopt.methods.fragments import Partition
from ftopt.optimizer import wrap
from tests.optimizer.running import train_and_look
from tests.problems import problem
from tests.reference.streaming import streaming

H, STEPS, LONG_S = 12, 100, 60.0
MERGES = [None, 0.0, 0.5, 1.0]


def _parameters(model: torch.nn.Module) -> list[Parameter]:
    return [Parameter(name, tuple(p.shape)) for name, p in model.named_parameters()]


def _compare(inner: str, rule: Partition, *, replicas: int, delay: int, alpha: float | None) -> None:
    task = problem("deep", inner)
    method = StreamingDiLoCo(
        sync_every=H,
        fragments=rule,
        delay=delay,
        mix=alpha,
        wait_for_result_s=LONG_S,
    )
    names = rule.fragments(_parameters(task.model(0)))
    theta, params = streaming(
        task, replicas=replicas, fragments=names, sync_every=H, delay=delay, steps=STEPS, alpha=alpha
    )
    for m, ours in enumerate(train_and_look(task, method, replicas=replicas, steps=STEPS)):
        for name, expected, got in zip(theta, theta.values(), ours.anchor, strict=True):
            assert torch.equal(got, expected), f"anchor {name}: off by {float((got - expected).abs().max())}"
        for name, expected, got in zip(theta, params[m], ours.params, strict=True):
            assert torch.equal(got, expected), f"{name} of r{m}: off by {float((got - expected).abs().max())}"


SHOWN = [  # (fragments, delay, alpha)
    (1, 0, None),
    (1, 5, 0.5),
    (2, 1, 1.0),
    (3, 5, None),  # more than an interval: several are under way
    (3, 1, 0.0),
    (5, 7, None),
    (5, 5, 0.5),
]
ALL = [(fragments, delay, alpha) for fragments in (1, 2, 3, 5) for delay in (0, 1, 5, 7) for alpha in MERGES]
RULES = [Sequential(n=3), Balanced(n=4), Named(patterns=["3", "*"])]


def _slow_but(shown: list[tuple[object, ...]], cases: Iterable[tuple[object, ...]]) -> list[ParameterSet]:
    return [pytest.param(*case, marks=[] if case in shown else [pytest.mark.slow]) for case in cases]


@pytest.mark.parametrize(("fragments", "delay", "alpha"), _slow_but(SHOWN, ALL))  # type: ignore[arg-type]
def test_streaming_equals_its_paper_bit_for_bit(fragments: int, delay: int, alpha: float | None) -> None:
    _compare("adamw", Strided(n=fragments), replicas=2, delay=delay, alpha=alpha)


@pytest.mark.parametrize(
    ("rule", "inner", "replicas"),
    _slow_but(
        [(RULES[0], "sgd", 1), (RULES[1], "sgd", 4), (RULES[2], "adamw", 4)],
        itertools.product(RULES, ("adamw", "sgd"), (1, 2, 4)),
    ),
)
def test_other_partitions_and_numbers_of_replicas_do_so_too(rule: Partition, inner: str, replicas: int) -> None:
    _compare(inner, rule, replicas=replicas, delay=5, alpha=None)


def test_what_is_decided_in_the_middle_of_the_boundary_at_delay_is_taken_up_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_reduce = threading.Event()
    applied: list[int] = []

    def on_event(event: Event) -> None:
        if event.event == "reduce":
            assert may_reduce.wait(LONG_S)
        elif event.event == "apply":
            applied.append(event.inner_step or 0)

    model = nn.Linear(3, 2)
    (group,) = local_groups(1, on_event=on_event)
    method = StreamingDiLoCo(sync_every=4, delay=2, fragments=Strided(n=1), wait_for_result_s=LONG_S)
    called_in = group.called_in

    def decided_before(fragment: int) -> bool:
        if optimizer.local_steps == 6:
            may_reduce.set()
            while group.outstanding(fragment):
                time.sleep(0.001)
        return called_in(fragment)

    monkeypatch.setattr(group, "called_in", decided_before)
    with wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=group) as optimizer:
        for _ in range(7):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        assert applied == [6]
