"""The grid's loop takes the steps that torch's own optimizers and ftopt's protocol take, and its list is in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

import ftopt
from benchmarks import training
from benchmarks.grid import kept, loop, study, tables
from benchmarks.grid.gradients import compiled, gradients_of, with_torch
from benchmarks.grid.loop import Outcome, Point
from benchmarks.grid.points import BASES, FAMILIES, SIZES, SYNC, Wanted, climb, start, wanted
from ftopt.config.inner_settings import factor
from ftopt.config.loader import load
from ftopt.config.tasks import Task
from ftopt.data.seeds import seed_of

SMALL = Point(rate=8e-3, batch=3, steps=7)


def trained(point: Point) -> list[list[Tensor]]:
    """The committed parameters after each inner step."""
    return [values for _, _, values in loop.steps(point, loop.task_for(point))]


def obvious(point: Point) -> list[list[Tensor]]:
    """The same with a model and optimizers a replica, one parameter after the other."""
    alone = point.kind == "alone"
    tasks = [loop.task_for(point) for _ in range(1 if alone else loop.REPLICAS)]
    streams = [task.batches(seed_of(point.seed, f"r{m}", 1)) for m, task in enumerate(tasks)]
    optimizers = [_optimizers(task, point) for task in tasks]
    parameters = [list(task.model.parameters()) for task in tasks]
    anchor = [p.detach().clone() for p in parameters[0]]
    velocity = [torch.zeros_like(p) for p in anchor]
    met, found = 0, []
    recipe = load(loop.RECIPE)
    assert not isinstance(recipe.inner, list)
    for step in range(point.steps):
        together = point.kind == "sync" or (point.kind == "diloco" and step < point.lead)
        for task, stream in zip(tasks, streams, strict=True):
            task.model.zero_grad()
            task.loss(stream.batch()).backward()  # type: ignore[no-untyped-call]
        if together:
            for of_all in zip(*parameters, strict=True):
                mean = torch.stack([_gradient(p) for p in of_all]).mean(0)
                for p in of_all:
                    p.grad = mean.clone()
        for own, optimizer in zip(parameters, optimizers, strict=True):
            nn.utils.clip_grad_norm_(own, 1.0)
            for one in optimizer:
                for group in one.param_groups:
                    group["lr"] = group["peak"] * point.part * factor(recipe.inner.schedule, step, point.steps)
                one.step()
        with torch.no_grad():
            if together or alone:
                anchor = [p.detach().clone() for p in parameters[0]]
            elif step + 1 in point.meets():
                mu = point.momentum(met)
                met += 1
                for k, of_all in enumerate(zip(*parameters, strict=True)):
                    delta = anchor[k] - torch.stack(list(of_all)).mean(0)
                    velocity[k] = mu * velocity[k] + delta
                    anchor[k] = anchor[k] - point.eta * (delta + mu * velocity[k])
                    for p in of_all:
                        p.copy_(anchor[k])
        found.append(list(anchor))
    return found


def _optimizers(task: Task, point: Point) -> list[torch.optim.Optimizer]:
    named = list(task.model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and name.startswith("blocks.")] if point.muon else []
    rest = [p for _, p in named if not any(p is matrix for matrix in matrices)]
    adam = torch.optim.AdamW(rest, betas=(0.9, 0.99), weight_decay=0.0)
    adam.param_groups[0]["peak"] = point.rate
    if point.muon is None:
        return [adam]
    muon = torch.optim.Muon(matrices, weight_decay=0.0)
    muon.param_groups[0]["peak"] = point.muon
    return [adam, muon]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def apart(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The distance, over the length."""
    return _length([a - b for a, b in zip(ones, others, strict=True)]) / _length(others)


def _length(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.detach().square().sum()) for tensor in tensors))


def test_the_compiled_gradients_are_torchs() -> None:
    if compiled() is None:
        pytest.skip("no compiler makes gpt.cpp here")
    task = loop.task_for(SMALL)
    with torch.no_grad():
        for parameter in task.model.parameters():  # far from the beginning, where attention is uniform
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    values = {name: parameter.detach() for name, parameter in task.model.named_parameters()}
    inputs, targets = task.batches(1).batch()
    fast, slow = ({name: torch.full_like(value, 7.0) for name, value in values.items()} for _ in range(2))
    loss = gradients_of(task.model)(inputs, targets, values, fast)
    assert loss == pytest.approx(with_torch(task.model)(inputs, targets, values, slow), rel=1e-6)
    for name, gradient in fast.items():
        assert apart([gradient], [slow[name]]) < 1e-5, name


@pytest.mark.parametrize(
    "point",
    [
        replace(SMALL, kind="sync"),
        replace(SMALL, kind="alone"),
        replace(SMALL, h=2, eta=1.0, mu=0.25),
        replace(SMALL, h=2, eta=0.7, mu=0.9, falling=True, lead=2, part=0.5),
        replace(SMALL, kind="sync", muon=0.02),
        replace(SMALL, h=3, eta=0.7, mu=0.5, muon=0.02, lead=1, seed=1),
    ],
    ids=lambda point: kept.described(point).replace(" ", "-"),
)
def test_the_loop_takes_the_steps_of_torchs_optimizers(point: Point) -> None:
    # a rounding error can turn the sign of a gradient that is nearly 0, which AdamW's first steps make a whole step;
    # Muon rounds to bf16
    limit = 2e-3 if point.muon is None else 2e-2
    begin = [p.detach() for p in loop.task_for(point).model.parameters()]
    for own, plain in zip(trained(point), obvious(point), strict=True):
        assert apart(own, plain) <= limit * (apart(plain, begin) or 1e-9)


def test_muons_iteration_for_a_stack_has_torchs_bits() -> None:
    for shape in ((3, 192, 64), (2, 64, 64), (2, 64, 256)):
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        each = [_zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7) for matrix in stack]
        assert torch.equal(loop.orthogonal(stack), torch.stack(each))


@pytest.mark.long
def test_ftopts_own_protocol_comes_to_the_same_loss() -> None:
    point = Point(rate=8e-3, steps=16, h=4, eta=0.7, mu=0.5)
    outer = ftopt.outer.SGD(lr=0.7, momentum=0.5, nesterov=True)
    method = ftopt.DiLoCo(sync_every=4, outer=outer)
    case = training.Case(recipe=loop.RECIPE, method=method, lr=8e-3, steps=16, eval_every=4)
    own = loop.train(point)
    assert own.curve == [(4, pytest.approx(own.curve[0][1])), *own.curve[1:]]
    assert own.loss == pytest.approx(training.train(case).loss, rel=1e-4)


def test_the_momentum_falls_from_the_first_outer_step_to_the_last() -> None:
    point = replace(SMALL, h=2, lead=1, mu=0.9, falling=True)
    assert point.meets() == [3, 5, 7]
    assert [point.momentum(number) for number in range(3)] == pytest.approx([0.9, 0.45, 0.0])
    assert replace(point, falling=False).momentum(2) == 0.9
    assert replace(point, h=7, lead=0).momentum(0) == 0.9, "one outer step"


def test_a_rate_is_the_best_only_between_two_worse_ones() -> None:
    losses: dict[Point, float] = {}
    at = replace(SMALL, rate=1.0)
    while missing := climb(losses, at, "rate")[1]:
        losses |= {point: abs(math.log2(point.rate / 8)) for point in missing}
    assert climb(losses, at, "rate")[0].rate == 8
    assert {point.rate for point in losses} == {0.5, 1, 2, 4, 8, 16}


def test_no_run_is_begun_before_its_rates_are_known_and_none_is_listed_twice() -> None:
    losses: dict[Point, float] = {}

    def loss(point: Point) -> float:
        muon = 0.0 if point.muon is None else abs(math.log2(point.muon / 0.04))
        return 1 + 0.1 * abs(math.log2(point.rate * point.part / 4e-3)) + 0.1 * muon

    sizes = ((16, 600), (16, 1200))
    rounds: list[list[Wanted]] = []
    while missing := [run for run in wanted(losses, 1, sizes) if run.point not in losses]:
        ready = [run.point for run in missing if run.ready]
        assert ready, "it stands still"
        losses |= {point: loss(point) for point in ready}
        rounds.append(missing)
    every = [run.point for run in wanted(losses, 1, sizes)]
    assert len(every) == len(set(every)) and set(every) <= losses.keys()
    assert all(point.rate in (2e-3, 4e-3, 8e-3, 1.6e-2) for point in losses)
    diloco = [point for point in every if point.kind == "diloco" and point.steps == 600 and point.h == 5]
    assert {point.rate for point in diloco} == {4e-3}
    assert len(diloco) == 12 * len(FAMILIES)
    # at the second size, the best part of the rate at a large momentum comes first: here the whole of it
    second = [point for point in every if point.steps == 1200 and point.mu == 0.9]
    assert [point.part for point in second][: 8 * len(FAMILIES)] == [1.0] * 8 * len(FAMILIES)
    assert start(losses, SYNC, sizes).point.rate == 4e-3
    assert {rounds[0][k].ready for k in range(len(BASES))} == {True}


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    book = kept.Kept(tmp_path / "grid.json")
    good = Outcome(loss=2.0, curve=[(150, 3.0)], training=1.0, wall_s=2.0, cpu_s=1.0)
    runs = {Point(rate=8e-3, h=5, mu=0.9): replace(good, loss=math.inf), Point(rate=8e-3, muon=0.02, h=5): good}
    for point, outcome in runs.items():
        book.keep(point, outcome, {"commit": "abc", "torch": "2", "python": "3"})
    again = kept.Kept(tmp_path / "grid.json")
    assert again.losses == {point: outcome.loss for point, outcome in runs.items()}
    assert kept.Kept(tmp_path / "grid.json", anew=True).losses == {}


def _first_size() -> dict[Point, float]:
    """All of it, two seeds; with the inner rate whole and the largest memory, training breaks down."""
    losses: dict[Point, float] = {}
    while missing := [run.point for run in wanted(losses, 2, SIZES[:1]) if run.ready and run.point not in losses]:
        for point in missing:
            loss = 2.0 if point.kind == "sync" else 2.0 + point.h / 100 + point.seed / 10 + abs(point.mu - 0.25)
            losses[point] = math.inf if point.part == 1 and point.mu == 0.9 and point.h == 50 else loss
    return losses


def test_tables_compare_with_sync_sgd_at_the_same_seed() -> None:
    lines = tables.all_of(_first_size(), 2)
    assert "## Batch 16, 600 inner steps" in lines
    assert any(line.startswith("| SyncSGD, AdamW | 0.008 | 2.000 +0.0% ±0.0 |") for line in lines), lines
    row = next(line for line in lines if line.startswith("| (1, 0.25) | 1 | 1.33 | 1-11 % |"))
    assert "| **2.100 +5.0% ±2.5** | **2.150 +7.5% ±2.5** |" in row
    assert sum("| 2.350 +17.5% ±2.5 |" in line for line in lines) == 3 * len(FAMILIES), "momentum 0 and 0.5"
    assert sum(line.endswith("| broke down |") for line in lines) == 2 * len(FAMILIES), "falling or not"
    rules = next(line for line in lines if line.startswith("| at most 2 |"))
    assert rules.count(", ") == 2 * 4, "median, worst, number in each column"


def test_a_picture_leaves_out_what_broke_down(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert tables.draw(_first_size(), 2, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_page_has_the_studys_figures() -> None:
    losses = kept.Kept(training.RESULTS / "grid.json").losses
    rows = [line.split("|")[3:5] for line in study.table(losses, 3)[3:]]
    published, here = ([round(float(x.split("%")[0])) for x in column] for column in zip(*rows, strict=True))
    page = " ".join(Path("docs/choosing.md").read_text(encoding="utf-8").split())
    for h, at in ((25, 0), (5, 3)):
        told = [", ".join(map(str, column[at : at + 3])) for column in (published, here)]
        assert f"H {h}: {told[0]} % and {told[1]} %" in page
    assert study.table({}, 3) == []
