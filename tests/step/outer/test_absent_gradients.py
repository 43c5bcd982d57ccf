"""Which parameters have a gradient is agreed: all replicas step the same ones, and those that nobody has one for stay.

What a replica's backward pass leaves for a parameter in a step is None, exactly 0, or a number drawn at random.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ftopt
from ftopt._connect import local_groups
from ftopt.events import Event
from ftopt.methods import PAFT, Method, SyncSGD
from ftopt.optimizer import wrap
from ftopt.step.outer.rebase import Rebase
from ftopt.step.tensors.gradients import GradientView
from ftopt.sync.group import ReplicaGroup
from tests.optimizer.running import PATIENT, together
from tests.problems import flat
from tests.reference.codecs import Mean
from tests.versions import needs_muon

Gradients = Callable[[int, int], Sequence[Tensor | None]]
"""(replica, step) -> the parameters' gradients."""

SHAPES = [(8, 6), (5,), (6, 8), (7,)]
STEPS = 24


class Bare(nn.Module):
    """Parameters that nothing is computed with: the tests say what their gradients are."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for number, shape in enumerate(SHAPES):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator)))


def adamw(parameters: Iterator[nn.Parameter]) -> list[Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)]


def momentum(parameters: Iterator[nn.Parameter]) -> list[Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1)]


def muon(parameters: Iterator[nn.Parameter]) -> list[Optimizer]:
    every = list(parameters)
    matrices, rest = [p for p in every if p.dim() == 2], [p for p in every if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1), *adamw(iter(rest))]


def sgd(parameters: Iterator[nn.Parameter]) -> list[Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.01)]


INNERS = {"plain": sgd, "adamw": adamw, "momentum": momentum, "muon": muon}


def mixed(replica: int, step: int) -> list[Tensor | None]:
    """Each with chance a half None, a quarter 0; the last parameter has none at all until step 20."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    found: list[Tensor | None] = []
    for number, shape in enumerate(SHAPES):
        kind = int(torch.randint(4, (), generator=generator))
        drawn = torch.randn(shape, generator=generator)
        absent = kind < 2 or (number == len(SHAPES) - 1 and step < 20)
        found.append(None if absent else drawn * (kind - 2))
    return found


def take(optimizer: ftopt.ReplicaOptimizer, model: nn.Module, gradients: Sequence[Tensor | None]) -> None:
    """One step with these gradients."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    optimizer.step()


def train(
    method: Method,
    gradients: Gradients = mixed,
    *,
    inner: str = "adamw",
    replicas: int = 3,
    steps: int = STEPS,
    codec: str = "fp32",
) -> list[tuple[nn.Module, list[Optimizer]]]:
    groups, method = local_groups(replicas, policy=PATIENT), replace(method, codec=codec)

    def replica(m: int) -> tuple[nn.Module, list[Optimizer]]:
        model = Bare()
        optimizers = INNERS[inner](model.parameters())
        with wrap(optimizers, model, method, group=groups[m]) as optimizer:
            for step in range(steps):
                take(optimizer, model, gradients(m, step))
        return model, optimizers

    return together([lambda m=m: replica(m) for m in range(replicas)])


def plain(gradients: Gradients = mixed, *, inner: str = "adamw", replicas: int = 3) -> nn.Module:
    """One model: the mean over all replicas, None counting as 0, and None where nobody has one."""
    model = Bare()
    optimizers, mean = INNERS[inner](model.parameters()), Mean()
    for step in range(STEPS):
        rows = [gradients(m, step) for m in range(replicas)]
        full = [[torch.zeros(s) if g is None else g for g, s in zip(row, SHAPES, strict=True)] for row in rows]
        for number, (parameter, found) in enumerate(zip(model.parameters(), mean(full), strict=True)):
            parameter.grad = None if all(row[number] is None for row in rows) else found
        for optimizer in optimizers:
            optimizer.step()
    return model


def alike(found: list[tuple[nn.Module, list[Optimizer]]]) -> None:
    """Parameters and inner state of all replicas are equal, bit for bit."""
    first, first_optimizers = found[0]
    for model, optimizers in found[1:]:
        assert torch.equal(flat(model), flat(first))
        for ours, theirs in zip(optimizers, first_optimizers, strict=True):
            states = [ours.state_dict()["state"], theirs.state_dict()["state"]]
            assert states[0].keys() == states[1].keys()
            for key in states[0]:
                assert all(torch.equal(states[0][key][name], value) for name, value in states[1][key].items())


@pytest.mark.parametrize("inner", [pytest.param(name, marks=needs_muon if name == "muon" else ()) for name in INNERS])
def test_the_steps_are_those_of_one_model_with_the_mean_and_none_where_nobody_has_one(inner: str) -> None:
    found = train(SyncSGD(), inner=inner)
    alike(found)
    assert torch.equal(flat(found[0][0]), flat(plain(inner=inner)))


@pytest.mark.parametrize("codec", ["int8", "fp4", "top_k:0.1:4"])
def test_replicas_stay_alike_whatever_the_codec(codec: str) -> None:
    alike(train(SyncSGD(clip_norm=0.5), codec=codec))


def test_replicas_between_two_averages_stay_alike() -> None:
    alike(train(PAFT(sync_every=1000)))


def test_one_that_has_a_gradient_of_exactly_0_and_one_that_has_none_take_the_same_step() -> None:
    """The matrix A of LoRA at its first step, where B is 0, beside a replica that does not use the adapter."""

    def gradients(replica: int, step: int) -> list[Tensor | None]:
        return [torch.zeros(s) if replica == 0 or number else None for number, s in enumerate(SHAPES)]

    found = train(SyncSGD(), gradients, steps=1, replicas=2)
    alike(found)
    assert not torch.equal(found[1][0].p0, Bare().p0), "weight decay moves what has a gradient"  # type: ignore[arg-type]


@needs_muon
def test_what_nobody_has_a_gradient_for_is_not_moved_by_weight_decay_and_momentum() -> None:
    def gradients(replica: int, step: int) -> list[Tensor | None]:
        return [torch.ones(s) if number or not step else None for number, s in enumerate(SHAPES)]

    for inner in INNERS:
        once, more = (
            train(SyncSGD(), gradients, inner=inner, steps=1),
            train(SyncSGD(), gradients, inner=inner, steps=5),
        )
        assert torch.equal(once[0][0].p0, more[0][0].p0)  # type: ignore[arg-type]
        assert not torch.equal(once[0][0].p1, more[0][0].p1)  # type: ignore[arg-type]


def test_one_backward_pass_of_several_that_has_a_gradient_is_enough() -> None:
    def gradients(replica: int, step: int) -> list[Tensor | None]:
        return [
            torch.zeros(s) if number or (replica == 0 and step % 3 == 0) else None for number, s in enumerate(SHAPES)
        ]

    found = train(SyncSGD(sync_every=3), gradients, steps=6, replicas=2)
    alike(found)
    assert not torch.equal(found[0][0].p0, Bare().p0)  # type: ignore[arg-type]


def test_what_is_carried_over_has_a_gradient_where_the_steps_after_the_counted_ones_had_one() -> None:
    model = Bare()
    view = GradientView(model)

    def add(*present: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.zeros_like(parameter) if number in present else None
        view.add()

    def has_one() -> list[bool]:
        return (view.read(view.empty())[view.trained :] > 0).tolist()

    add(0, 1)
    counted = view.read(view.empty())
    add(1, 2)
    assert has_one() == [True, True, True, False]
    Rebase(view, counted, torch.zeros_like(counted), []).go_on()
    assert has_one() == [False, True, True, False]


def test_what_a_codec_left_out_of_earlier_gradients_is_used_when_nobody_has_a_new_one() -> None:
    def gradients(replica: int, step: int) -> list[Tensor | None]:
        return [None if step else torch.ones(s) for s in SHAPES]

    found = train(SyncSGD(), gradients, inner="plain", replicas=2, codec="top_k:0.1:4")
    alike(found)
    moved = flat(Bare()) - flat(found[0][0])
    assert bool((moved > 0.009).all()), "all of the gradient has been used"


def test_a_joiner_steps_the_same_parameters() -> None:
    running, proposed = threading.Event(), threading.Event()

    def on_event(event: Event) -> None:
        if event.event == "gather" and event.replica == "r1":
            proposed.set()

    groups = local_groups(2, policy=replace(PATIENT, start_replicas=1), on_event=on_event)

    def first() -> nn.Module:
        model = Bare()
        with wrap(adamw(model.parameters()), model, SyncSGD(), group=groups[0]) as optimizer:
            for step in range(60):
                take(optimizer, model, mixed(0, step))
                if optimizer.inner_step >= 5 and not running.is_set():
                    running.set()
                    with optimizer._core.started().at_rest():  # else the other one fetches at the next step
                        assert proposed.wait(60)  # newcomers are waited for half a second
        return model

    def second() -> nn.Module:
        model = Bare()
        assert running.wait(60)
        with wrap(adamw(model.parameters()), model, SyncSGD(), group=groups[1]) as optimizer:
            for step in range(optimizer.start_step, 60):
                take(optimizer, model, mixed(1, step))
                if optimizer.inner_step >= 60:
                    break
        return model

    models = together([first, second])
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_parameters_without_a_gradient_in_a_whole_global_batch_stay() -> None:
    """Each replica has a gradient for the first parameter in some of its units alone; nobody has one for the second."""
    samples = torch.arange(24.0).view(24, 1)
    groups = local_groups(2, policy=replace(PATIENT, heartbeat_s=0.05))

    def replica(group: ReplicaGroup) -> nn.Module:
        model = Bare()
        optimizer = wrap(adamw(model.parameters()), model, SyncSGD(), group=group)
        loader = ftopt.DataLoader(_Rows(samples), 2, group=group, epochs=2, global_batch=8)
        with optimizer:
            for micro_batches in loader.global_batches():
                for rows in micro_batches:
                    first = 0.0 * model.p0.sum() if float(rows[0]) % 3 == 0 else 0.0  # type: ignore[operator]
                    (first + rows.mean() * model.p2.sum()).backward()  # type: ignore[operator]
                optimizer.step()
        return model

    models = together([lambda group=group: replica(group) for group in groups])
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert torch.equal(models[0].p1, Bare().p1) and not torch.equal(models[0].p0, Bare().p0)  # type: ignore[arg-type]


class _Rows:
    random = False

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def test_steps_that_weigh_nothing_at_the_end_of_the_data_do_not_use_the_last_gradient_again() -> None:
    """Their units are done all the same, in a version of their own."""
    (group,) = local_groups(1)
    model = Bare()
    optimizer = wrap(sgd(model.parameters()), model, SyncSGD(), group=group)
    loader = ftopt.DataLoader(_Rows(torch.ones(6, 1)), 1, group=group)
    with optimizer:
        for number, rows in enumerate(loader):
            optimizer.zero_grad()
            (rows.sum() * model.p0.sum() * (1.0 if number < 4 else torch.nan)).backward()  # type: ignore[operator]
            optimizer.step()
    assert optimizer.status.versions[0] > 4
    torch.testing.assert_close(model.p0, Bare().p0 - 4 * 0.01)  # type: ignore[operator]


def test_a_global_batch_without_any_finite_share_moves_nothing() -> None:
    (group,) = local_groups(1)
    model = Bare()
    optimizer = wrap(adamw(model.parameters()), model, SyncSGD(), group=group)
    loader = ftopt.DataLoader(_Rows(torch.full((8, 1), torch.nan)), 2, group=group, global_batch=4)
    with optimizer:
        for micro_batches in loader.global_batches():
            for rows in micro_batches:
                (rows.sum() * model.p0.sum()).backward()  # type: ignore[operator]
            optimizer.step()
    assert optimizer.status.versions == (2,) and torch.equal(flat(model), flat(Bare()))
