"""Averages of what replicas hold alike are that, bit for bit: parameters that nobody has trained do not move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor, nn

from ftopt.fragments import Strided
from ftopt.methods import PAFT, DiLoCo, LocalSGD, Method, SlowMo, StreamingDiLoCo, SyncSGD
from tests.optimizer.running import train_and_look
from tests.problems import Problem, alike, problem

H, STEPS = 3, 12
METHODS: list[Method] = [
    LocalSGD(sync_every=H),
    LocalSGD(sync_every=H, average_until_step=6, weights="uniform"),
    PAFT(sync_every=H),
    PAFT(sync_every=H, delay=1),
    DiLoCo(sync_every=H, average_until_step=6),
    SlowMo(sync_every=H),
    StreamingDiLoCo(sync_every=H, fragments=Strided(n=2), mix=0.3, wait_for_result_s=60.0),
]


def _half_trained(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The first half of the parameters at rate 0."""
    found = list(parameters)
    return torch.optim.AdamW([{"params": found[:2], "lr": 0.0}, {"params": found[2:], "lr": 1e-2}])


def _cases() -> Iterator[ParameterSet]:
    """The whole product; by default, each method with 3 replicas and with more, with one codec each."""
    for a, method in enumerate(METHODS):
        for replicas in (1, 3, 5, 7, 6):
            for c, codec in enumerate(("fp32", "int8")):
                many = 5 + 2 * (a // 2 % 2)
                few = (replicas == 3 and a % 2 == c) or (replicas == many and a % 2 != c)
                marks = [] if few else [pytest.mark.slow]
                yield pytest.param(method, replicas, codec, marks=marks, id=f"{method.name}{a}-{replicas}-{codec}")


@pytest.mark.long
@pytest.mark.parametrize(("method", "replicas", "codec"), list(_cases()))
def test_parameters_at_rate_0_keep_every_bit(method: Method, replicas: int, codec: str) -> None:
    task = Problem(problem("mlp").model, _half_trained)
    before = [p.detach().clone() for p in task.model(0).parameters()]
    for ours in train_and_look(task, method, replicas=replicas, steps=STEPS, codec=codec):
        for params in (ours.params, ours.left):
            assert all(torch.equal(now, then) for now, then in zip(params[:2], before[:2], strict=True))
            assert not torch.equal(params[2], before[2])


@pytest.mark.parametrize("replicas", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_paft_is_sync_sgd_bit_for_bit_where_nothing_goes_wrong(replicas: int) -> None:
    task = problem("mlp")
    plain = train_and_look(task, SyncSGD(), replicas=replicas, steps=STEPS)[0].params
    for ours in train_and_look(task, PAFT(sync_every=H), replicas=replicas, steps=STEPS):
        assert all(torch.equal(a, b) for a, b in zip(ours.params, plain, strict=True))


def test_averaged_buffers_that_training_does_not_change_keep_every_bit() -> None:
    @alike
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).eval()
        made.get_buffer("1.running_mean").normal_()
        return made

    task = Problem(model, problem().inner)
    expected, kept = model(0).get_buffer("1.running_mean"), list[Tensor]()

    class Kept(Problem):
        def backward(self, model: nn.Module, replica: int, step: int) -> Tensor:
            kept.append(model.get_buffer("1.running_mean").clone())
            return super().backward(model, replica, step)

    for method in (LocalSGD(sync_every=H, buffers="mean"), DiLoCo(sync_every=H, buffers="mean")):
        train_and_look(Kept(task.model, task.inner), method, replicas=3, steps=STEPS)
    assert len(kept) == 2 * 3 * STEPS and all(torch.equal(buffer, expected) for buffer in kept)
