from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import nn

from ftopt._connect import local_groups
from ftopt.events import Event
from ftopt.fragments import Balanced, Named, Parameter, Strided
from ftopt.methods import StreamingDiLoCo
from ftopt.methods.fragments import Partition, _tell_fewer
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.outer import SGD
from ftopt.step.outer.rebase import Rebase, mix
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.pieces import _ON_CPU
from tests.optimizer.running import PATIENT, train_and_look
from tests.problems import flat, problem
from tests.reference.easgd import easgd
from tests.reference.streaming import streaming

H, STEPS, LONG_S = 12, 100, 60.0
MERGES = [None, 0.0, 0.3, 0.5, 1.0]


def _parameters(model: torch.nn.Module) -> list[Parameter]:
    return [Parameter(name, tuple(p.shape)) for name, p in model.named_parameters()]


@pytest.mark.parametrize(("rule", "of"), [(Strided, "2 blocks"), (Balanced, "4 tensors")])
def test_a_small_model_has_fewer_fragments_than_asked_for(
    rule: type[Strided | Balanced], of: str, caplog: pytest.LogCaptureFixture
) -> None:
    _tell_fewer.cache_clear()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for _ in range(2):
        found = rule(n=24).fragments(_parameters(model))
    assert all(found) and sorted(itertools.chain(*found)) == sorted(name for name, _ in model.named_parameters())
    assert caplog.text.count(f"{rule.__name__}(n=24): the model has {of}, so there are {len(found)} fragments") == 1


def _compare(
    inner: str,
    rule: Partition,
    *,
    replicas: int,
    delay: int,
    alpha: float | None,
    outer_start: int = 0,
) -> None:
    task = problem("deep", inner)
    method = StreamingDiLoCo(
        sync_every=H,
        outer="paper",
        fragments=rule,
        delay=delay,
        mix=alpha,
        wait_for_result_s=LONG_S,
        average_until_step=outer_start,
    )
    names = rule.fragments(_parameters(task.model(0)))
    theta, params = streaming(
        task,
        replicas=replicas,
        fragments=names,
        sync_every=H,
        delay=delay,
        steps=STEPS,
        alpha=alpha,
        outer_start=outer_start,
    )
    for m, ours in enumerate(train_and_look(task, method, replicas=replicas, steps=STEPS)):
        for name, expected, got in zip(theta, theta.values(), ours.anchor, strict=True):
            assert torch.equal(got, expected), f"anchor {name}: off by {float((got - expected).abs().max())}"
        for name, expected, got in zip(theta, params[m], ours.params, strict=True):
            assert torch.equal(got, expected), f"{name} of r{m}: off by {float((got - expected).abs().max())}"


SHOWN = [  # (fragments, delay, alpha)
    (1, 0, None),
    (1, 0, 0.5),
    (3, 0, 0.3),
    (1, 5, 0.5),
    (2, 1, 1.0),
    (3, 5, None),  # more than an interval: several are under way
    (3, 1, 0.0),
    (5, 7, None),
    (5, 5, 0.5),
]
ALL = [(fragments, delay, alpha) for fragments in (1, 2, 3, 5) for delay in (0, 1, 5, 7) for alpha in MERGES]
RULES = [Balanced(n=4), Named(patterns=["3", "*"])]


def _slow_but(shown: list[tuple[object, ...]], cases: Iterable[tuple[object, ...]]) -> list[ParameterSet]:
    return [pytest.param(*case, marks=[] if case in shown else [pytest.mark.slow]) for case in cases]


@pytest.mark.long
@pytest.mark.parametrize(("fragments", "delay", "alpha"), _slow_but(SHOWN, ALL))  # type: ignore[arg-type]
def test_streaming_equals_its_paper_bit_for_bit(fragments: int, delay: int, alpha: float | None) -> None:
    _compare("adamw", Strided(n=fragments), replicas=2, delay=delay, alpha=alpha)


@pytest.mark.long
@pytest.mark.parametrize("delay", [0, 5])
def test_it_begins_after_the_synchronous_start_which_does_not_mix(delay: int) -> None:
    _compare("adamw", Strided(n=3), replicas=2, delay=delay, alpha=0.3, outer_start=7)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "inner", "replicas"),
    _slow_but(
        [(RULES[0], "sgd", 4), (RULES[1], "adamw", 4)],
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
            assert group.wait(fragment, timeout_s=LONG_S)
        return called_in(fragment)

    monkeypatch.setattr(group, "called_in", decided_before)
    with wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=group) as optimizer:
        for _ in range(7):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        assert applied == [6]


def test_a_joiners_fragments_are_due_at_the_same_steps_of_the_job_as_the_others() -> None:
    proposed: list[tuple[str, int, int]] = []

    def on_event(event: Event) -> None:
        if event.event == "propose":
            assert event.fragment is not None and event.inner_step is not None
            proposed.append((event.replica, event.fragment, event.inner_step))

    task, delay = problem("deep"), 5
    method = StreamingDiLoCo(sync_every=H, delay=delay, wait_for_result_s=LONG_S)
    models = [task.model(m) for m in range(2)]
    groups = local_groups(2, policy=replace(PATIENT, start_replicas=1), on_event=on_event)

    def train(optimizer: ReplicaOptimizer, m: int, steps: int) -> None:
        for step in range(steps):
            task.backward(models[m], m, step)
            optimizer.step()

    with wrap(task.inner(models[0].parameters()), models[0], method, group=groups[0]) as first:
        train(first, 0, 3 * H + delay)
        joins = wrap(
            task.inner(models[1].parameters()), models[1], replace(method, wait_for_result_s=0.0), group=groups[1]
        )
        with joins:
            train(joins, 1, H)
            seen = proposed.copy()
            joins.close(flush=False)
        first.close(flush=False)
    assert all((step - 4 * fragment) % H == 0 for _, fragment, step in seen), seen
    assert sorted(fragment for replica, fragment, _ in seen if replica == "r1") == [0, 1, 2]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7, 1.0])
def test_mixing_leaves_alone_what_nobody_has_moved_and_has_exact_ends(alpha: float) -> None:
    now, start = torch.randn(10_000), torch.randn(10_000)
    assert torch.equal(mix(start, start, alpha), start)
    mixed = mix(now, start, alpha)
    torch.testing.assert_close(mixed, now * alpha + start * (1 - alpha), rtol=0, atol=1e-6)
    if alpha in (0.0, 1.0):
        assert torch.equal(mixed, now if alpha else start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_a_mix_that_an_exception_interrupts_goes_on_where_it_was(
    alpha: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = FlatView(nn.Linear(1, 2 * _ON_CPU + 3, dtype=dtype))
    start, move = view.cast(torch.randn(view.numel)), Rebase._move
    expected = view.cast(mix(view.read(view.empty()), start, alpha))
    sweep, calls = Rebase(view, start, start, alpha=alpha), iter(range(99))

    def once(self: Rebase, *part: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return move(self, *part)

    monkeypatch.setattr(Rebase, "_move", once)
    with pytest.raises(KeyboardInterrupt):
        sweep.go_on()
    assert not torch.equal(view.read(view.empty()), expected)
    assert sweep.go_on() and torch.equal(view.read(view.empty()), expected)


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_elastic_averaging_is_mixing_without_a_delay(inner: str) -> None:
    centre, params = easgd(problem("deep", inner), replicas=3, sync_every=H, steps=5 * H, alpha=0.3, beta=0.9)
    method = StreamingDiLoCo(sync_every=H, fragments=Strided(n=1), delay=0, mix=0.7, outer=SGD(lr=0.9))
    for trained, own in zip(
        train_and_look(problem("deep", inner), method, replicas=3, steps=5 * H), params, strict=True
    ):
        torch.testing.assert_close(trained.anchor, centre, rtol=0, atol=1e-6)
        torch.testing.assert_close(trained.params, own, rtol=0, atol=1e-6)
    assert not torch.equal(params[0][0], params[1][0]), "replicas stay apart"


def test_steps_that_nothing_overlaps_are_not_discarded_by_mixing() -> None:
    task = problem("mlp", "sgd")
    model, discarded = task.model(0), list[Event]()
    (group,) = local_groups(1, on_event=lambda event: discarded.append(event) if event.event == "discarded" else None)
    method = StreamingDiLoCo(sync_every=3, delay=0, mix=0.5, fragments=Strided(n=1))
    with wrap(task.inner(model.parameters()), model, method, group=group) as optimizer:
        for step in range(9):
            optimizer.zero_grad()
            task.backward(model, 0, step)
            optimizer.step()
        assert optimizer.inner_step == optimizer.status.committed_step == 9 and optimizer.pending_steps == 0
        with optimizer.global_parameters():
            anchor = flat(model)
        assert not torch.equal(flat(model), anchor), "half of it is the replica's own"
    assert not discarded
