"""Buffers that training changes: averaged with the parameters, or each replica's own."""

from __future__ import annotations

import copy
import threading
from collections import abc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups, solo
from ftopt.errors import UserError
from ftopt.fragments import Named
from ftopt.methods import DiLoCo, LocalSGD, Method, StreamingDiLoCo
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.outer import SGD
from ftopt.step.tensors.buffers import averaged, keep_possible, shared_out
from tests.optimizer.running import PATIENT, anchor, together
from tests.problems import INNER, Problem, alike
from tests.reference.buffers import average_buffers
from tests.reference.codecs import Mean
from tests.reference.diloco import diloco
from tests.reference.local_sgd import local_sgd

REPLICAS, SYNC_EVERY, STEPS = 3, 5, 25


@alike
def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4), nn.BatchNorm1d(4))


def task(inner: str = "adamw") -> Problem:
    return Problem(normed, INNER[inner])


def floats(model: nn.Module) -> list[Tensor]:
    return [buffer.detach().clone() for buffer in model.buffers() if buffer.is_floating_point()]


def step(problem: Problem, optimizer: ReplicaOptimizer, model: nn.Module, replica: int, number: int) -> None:
    optimizer.zero_grad()
    problem.backward(model, replica, number)
    optimizer.step()


def ran(
    problem: Problem, method: Method, replicas: int = REPLICAS, codec: str = "fp32"
) -> list[tuple[list[Tensor], nn.Module, str]]:
    """Each replica's anchor after the last round, its model then, and its digest."""
    models = [problem.model(0) for _ in range(replicas)]
    groups, method = local_groups(replicas, policy=PATIENT), replace(method, codec=codec)
    all_there = threading.Barrier(replicas, timeout=60)

    def replica(m: int) -> tuple[list[Tensor], nn.Module, str]:
        with wrap(problem.inner(models[m].parameters()), models[m], method, group=groups[m]) as optimizer:
            for number in range(STEPS):
                step(problem, optimizer, models[m], m, number)
            optimizer.sync(propose=False)
            all_there.wait()
            result = anchor(optimizer, models[m]), copy.deepcopy(models[m]), optimizer.digest()
            all_there.wait()
            return result

    return together([lambda m=m: replica(m) for m in range(replicas)])


def naive(problem: Problem, method: Method, *, average: bool) -> tuple[list[Tensor], list[nn.Module]]:
    """The anchor, and the models after the last round."""
    models: list[nn.Module] = []

    def also(now: abc.Sequence[nn.Module]) -> None:
        models[:] = now
        if average:
            average_buffers(now)

    reference: Any = diloco if isinstance(method, DiLoCo) else local_sgd
    expected = reference(problem, replicas=REPLICAS, sync_every=SYNC_EVERY, steps=STEPS, also=also)
    return expected, models


@pytest.mark.long
@pytest.mark.parametrize("buffers", ["local", "mean"])
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
@pytest.mark.parametrize("method", [DiLoCo, LocalSGD])
def test_a_net_with_batch_norm_trains_as_the_plain_loop_does(method: Any, inner: str, buffers: str) -> None:
    chosen = method(sync_every=SYNC_EVERY, buffers=buffers)
    expected, models = naive(task(inner), chosen, average=buffers == "mean")
    results = ran(task(inner), chosen)
    for (ours, model, _), reference in zip(results, models, strict=True):
        assert all(map(torch.equal, ours, expected))
        assert all(map(torch.equal, model.buffers(), reference.buffers()))
    means = [floats(model) for _, model, _ in results]
    assert all(map(torch.equal, means[0], means[1])) == (buffers == "mean")
    assert results[0][2] == results[1][2]


def test_replicas_of_half_precision_agree_on_the_mean() -> None:
    problem = Problem(lambda seed: normed(seed).bfloat16(), INNER["sgd"])
    results = ran(problem, DiLoCo(sync_every=SYNC_EVERY, buffers="mean"))
    assert all(map(torch.equal, floats(results[0][1]), floats(results[2][1])))
    assert results[0][2] == results[2][2]


@pytest.mark.parametrize("method", [DiLoCo, LocalSGD])
def test_a_codec_that_rounds_does_not_see_buffers(method: Any) -> None:
    """What it rounds may come out negative, and a variance must not."""
    codec = "top_k:0.1:4"
    reference: Any = diloco if method is DiLoCo else local_sgd
    models: list[nn.Module] = []

    def also(now: abc.Sequence[nn.Module]) -> None:
        average_buffers(now)
        models[:] = now

    mean = Mean(codec, names=[name for name, _ in task().model(0).named_parameters()])
    expected = reference(task(), replicas=REPLICAS, sync_every=SYNC_EVERY, steps=STEPS, also=also, mean=mean)
    results = ran(task(), method(sync_every=SYNC_EVERY, buffers="mean"), codec=codec)
    for (ours, model, digest), plain in zip(results, models, strict=True):
        assert all(map(torch.equal, ours, expected))
        assert all(map(torch.equal, floats(model), floats(plain)))
        assert digest == results[0][2]


@pytest.mark.parametrize("delay", [0, 2])
def test_fragments_average_the_buffers_of_their_modules(delay: int) -> None:
    halves = Named(patterns=["[01].*", "*"])
    method = StreamingDiLoCo(
        sync_every=SYNC_EVERY, fragments=halves, delay=delay, buffers="mean", wait_for_result_s=60.0
    )
    (_, one, digest), (_, other, same), _ = ran(task(), method)
    assert digest == same
    assert all(map(torch.equal, floats(one)[:2], floats(other)[:2])), "fragment 0's round was just now"
    assert not torch.equal(floats(one)[2], floats(other)[2]), "fragment 1's was two steps ago"


def test_alone_a_replica_keeps_its_buffers_bit_for_bit() -> None:
    bare = normed()
    inner = task().inner(bare.parameters())
    for number in range(STEPS):
        inner.zero_grad()
        task().backward(bare, 0, number)
        inner.step()
    ((_, model, _),) = ran(task(), LocalSGD(sync_every=SYNC_EVERY, buffers="mean"), replicas=1)
    assert all(map(torch.equal, model.state_dict().values(), bare.state_dict().values()))


def test_the_outer_parameters_have_the_committed_buffers() -> None:
    problem, model = task(), normed()
    with wrap(
        problem.inner(model.parameters()), model, DiLoCo(sync_every=2, buffers="mean"), group=solo()
    ) as optimizer:
        for number in range(2):
            step(problem, optimizer, model, 0, number)
        committed = floats(model)
        step(problem, optimizer, model, 0, 2)
        mine = floats(model)
        with optimizer.global_parameters():
            assert all(map(torch.equal, floats(model), committed))
        assert all(map(torch.equal, floats(model), mine))
        assert not torch.equal(mine[0], committed[0])
        assert model[1].num_batches_tracked == 3  # type: ignore[index]


@pytest.mark.parametrize("buffers", ["local", "mean"])
def test_a_newcomer_gets_the_buffers(buffers: str) -> None:
    groups = local_groups(2, policy=replace(PATIENT, start_replicas=1))
    method = DiLoCo(sync_every=5, outer=SGD(lr=0.7), buffers=buffers)
    models, problem = [normed(0), normed(1)], task()
    running, joined = threading.Event(), threading.Event()
    committed: list[list[Tensor]] = []

    def first() -> None:
        with wrap(problem.inner(models[0].parameters()), models[0], method, group=groups[0]) as optimizer:
            for number in range(10):
                step(problem, optimizer, models[0], 0, number)
            committed.append(floats(models[0]))
            running.set()
            assert joined.wait(60)

    def second() -> None:
        assert running.wait(60)
        with wrap(problem.inner(models[1].parameters()), models[1], method, group=groups[1]):
            committed.append(floats(models[1]))
            joined.set()

    together([first, second])
    got = all(map(torch.equal, *committed))
    assert got == (buffers == "mean")


def test_a_module_without_parameters_counts_to_the_nearest_that_has_some() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)),
            "b": nn.BatchNorm1d(2),
            "ab": nn.BatchNorm1d(2, affine=False),
        }
    )
    names = averaged(model)
    assert names == [f"{m}.running_{what}" for m in ("a.1", "ab", "b") for what in ("mean", "var")]
    fragments = [["b.weight", "b.bias"], ["a.0.weight", "a.0.bias"]]
    assert shared_out(names, fragments) == [names[2:], names[:2]], "ab: the first fragment's first"
    with pytest.raises(UserError, match="exchanges gradients alone"):
        shared_out(names, [])


def test_counters_and_buffers_that_are_not_saved_stay_local() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    assert averaged(model) == ["running_mean", "running_var"]
    assert averaged(torch.compile(model, backend="eager")) == averaged(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("buffer", "said"),
    [(torch.full((2,), -torch.inf), "buffer odd holds NaN or Inf"), (torch.zeros(2).double(), "buffer odd is torch")],
)
def test_a_buffer_that_has_no_mean_is_refused_with_what_to_do(buffer: Tensor, said: str) -> None:
    model = normed()
    model.register_buffer("odd", buffer)
    method = LocalSGD(sync_every=5, buffers="mean")
    with pytest.raises(UserError, match=said), wrap(task().inner(model.parameters()), model, method, group=solo()):
        pass
    with pytest.raises(ValueError, match="allowed: local, mean"):
        LocalSGD(sync_every=5, buffers="average")


def test_a_rebased_buffer_stays_between_its_own_value_and_the_anchors() -> None:
    now, base, start = torch.tensor([0.2, 2.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.1, 1.5, 1.2])
    moved = now - base + start
    assert moved[0] < 0
    keep_possible("norm.running_var", moved, now, start)
    torch.testing.assert_close(moved, torch.tensor([0.1, 2.0, 1.2]))


def test_buffers_that_became_nan_go_back_to_the_committed_ones() -> None:
    problem, model = task(), normed()
    with wrap(
        problem.inner(model.parameters()), model, LocalSGD(sync_every=2, buffers="mean"), group=solo()
    ) as optimizer:
        for number in range(4):
            step(problem, optimizer, model, 0, number)
            if number == 2:
                model[1].running_var.fill_(torch.nan)  # type: ignore[index]
        assert all(bool(torch.isfinite(t).all()) for t in floats(model))
        assert optimizer.status.counted_step == 2
