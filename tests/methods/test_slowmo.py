from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ftopt._connect import solo
from ftopt.methods import DiLoCo, LocalSGD, ReplicaView, Round, SlowMo
from ftopt.optimizer import wrap
from ftopt.outer import SGD
from ftopt.step.outer.counters import Counters, StepTotals
from ftopt.undo import undo_step
from tests.optimizer.running import train
from tests.problems import Problem, problem
from tests.reference.bmuf import bmuf
from tests.reference.lookahead import lookahead
from tests.reference.slowmo import slowmo
from tests.reference.snoo import snoo

H, STEPS = 10, 60
Rate = Callable[[int], float]


def _nesterov(task: Problem) -> Problem:
    """With the inner optimizer for which the paper resets buffers."""
    return Problem(task.model, lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True))


def _loss(task: Problem, anchor: list[Tensor]) -> float:
    model = task.model(0)
    for p, value in zip(model.parameters(), anchor, strict=True):
        p.data.copy_(value)
    return sum(float(task.backward(model, 9, step).detach()) for step in range(20)) / 20


def _cosine(step: int) -> float:
    """Warms up, and ends in exactly 0 at step 70."""
    return 1e-3 * min(1.0, (step + 1) / 20) * max(0.0, 1 - step / 69)


def _restarting(step: int) -> float:
    """Warm restarts every 14 steps: rounds of 10 end anywhere between the top and exactly 0."""
    return 0.025 * (1 + math.cos(math.pi * (step % 14) / 13))


def _nearly_0_at_rounds(step: int) -> float:
    return 1e-6 if step % H == H - 1 else 0.05


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
@pytest.mark.parametrize("buffers", ["keep", "reset", "average"])
def test_slowmo_equals_its_paper_bit_for_bit(buffers: str, inner: str, replicas: int) -> None:
    task = _nesterov(problem("mlp")) if buffers == "reset" and inner == "sgd" else problem("mlp", inner)
    method = SlowMo(sync_every=H, slow_lr=0.9, slow_momentum=0.6, inner_state=buffers)
    expected = slowmo(task, replicas=replicas, sync_every=H, steps=STEPS, alpha=0.9, beta=0.6, buffers=buffers)
    for anchor in train(task, method, replicas=replicas, steps=STEPS):
        assert all(torch.equal(a, b) for a, b in zip(anchor, expected, strict=True))


def test_the_slow_momentum_is_measured_in_the_rates_of_a_schedule_that_ends_in_0() -> None:
    method = SlowMo(sync_every=H, slow_momentum=0.6)
    expected = slowmo(problem("mlp"), replicas=2, sync_every=H, steps=100, alpha=1.0, beta=0.6, rate=_cosine)
    for anchor in train(problem("mlp"), method, replicas=2, steps=100, rate=_cosine):
        assert all(torch.equal(a, b) for a, b in zip(anchor, expected, strict=True))
        assert all(bool(torch.isfinite(t).all()) for t in anchor)


@pytest.mark.long
@pytest.mark.parametrize("rate", [_restarting, _nearly_0_at_rounds])
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_where_the_rate_moves_within_a_round_it_is_no_worse_than_local_sgd(inner: str, rate: Rate) -> None:
    task, scale = problem("mlp", inner), 1.0 if inner == "sgd" else 0.1
    losses = []
    for method in (LocalSGD(sync_every=H), SlowMo(sync_every=H, slow_momentum=0.6)):
        anchor, _ = train(task, method, replicas=2, steps=20 * H, rate=lambda step: scale * rate(step))
        losses.append(_loss(task, anchor))
    assert losses[1] < 1.1 * losses[0]


@pytest.mark.parametrize(("rate", "replicas"), [(_restarting, 2), (_nearly_0_at_rounds, 1)])
def test_gamma_is_the_mean_of_the_rates_of_the_rounds_steps(rate: Rate, replicas: int) -> None:
    method = SlowMo(sync_every=H, slow_momentum=0.6)
    task = problem("mlp", "sgd")
    expected = slowmo(task, replicas=replicas, sync_every=H, steps=STEPS, alpha=1.0, beta=0.6, rate=rate)
    for anchor in train(task, method, replicas=replicas, steps=STEPS, rate=rate):
        assert all(torch.equal(a, b) for a, b in zip(anchor, expected, strict=True))


@given(lr=st.floats(1e-12, 1e3), before=st.lists(st.floats(0, 1e3), max_size=5), steps=st.integers(1, 300))
def test_the_mean_of_equal_rates_is_that_rate_bit_for_bit(lr: float, before: list[float], steps: int) -> None:
    totals = StepTotals()
    for rate in before:
        totals = totals.plus(rate, None, None)
    base = totals
    for _ in range(steps):
        totals = totals.plus(lr, None, None)
    assert totals.mean_rate(base) == lr
    assert Round(0, 1, 0, (), shares=(1 / 3,) * 3, scalars=((lr,),) * 3).mean(0) == lr


def test_the_sum_of_rates_leaves_out_steps_that_are_undone_and_survives_a_checkpoint() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with wrap(inner, model, SlowMo(sync_every=9), group=solo(), undo=True) as optimizer:
        for step in range(6):
            inner.param_groups[0]["lr"] = 0.1 * (step + 1)
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if step == 2:
                undo_step(optimizer)
        totals = optimizer._core.started().counters.totals
        again = Counters()
        again.restore(json.loads(json.dumps(optimizer._core.started().counters.capture())))
    assert totals.rated == 5 and totals.mean_rate(StepTotals()) == pytest.approx((0.1 + 0.2 + 0.4 + 0.5 + 0.6) / 5)
    assert again.totals == totals


@pytest.mark.parametrize("rate", [0.0, 1e-40])
def test_at_rate_0_the_mean_displacement_is_taken_and_the_momentum_stays(rate: float) -> None:
    method = SlowMo(slow_lr=0.5, slow_momentum=0.6)
    anchor, momentum, mean = torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([0.25])
    at = Round(0, 1, 0, (), scalars=((rate,),))
    new, state = method.outer_step(anchor, {"momentum": momentum}, mean, at)
    assert (new.item(), state["momentum"].item()) == (0.875, 3.0)


def test_the_rate_is_the_weighted_mean_of_the_members() -> None:
    method = SlowMo(slow_momentum=0.0)
    scalars = [
        method.scalars(ReplicaView(torch.zeros(1), torch.zeros(1), torch.zeros(1), (), lr=lr)) for lr in (0.1, 0.4)
    ]
    at = Round(0, 1, 0, (), shares=(0.75, 0.25), scalars=tuple(scalars))
    _, state = method.outer_step(torch.zeros(1), method.init(torch.zeros(1)), torch.tensor([0.35]), at)
    assert state["momentum"].item() == pytest.approx(0.35 / 0.175)


def test_at_a_constant_rate_it_is_diloco_with_a_heavy_ball_to_rounding() -> None:
    ours = train(problem(), SlowMo(sync_every=H, slow_lr=0.7, slow_momentum=0.5), replicas=2, steps=STEPS)
    outside = SGD(lr=0.7, momentum=0.5)
    theirs = train(problem(), DiLoCo(sync_every=H, outer=outside), replicas=2, steps=STEPS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_lookahead_is_one_replica_without_momentum(inner: str) -> None:
    expected = lookahead(problem("mlp", inner), k=5, alpha=0.5, steps=STEPS)
    for method in (
        SlowMo(sync_every=5, slow_lr=0.5, slow_momentum=0.0),
        DiLoCo(sync_every=5, outer=SGD(lr=0.5)),
    ):
        (anchor,) = train(problem("mlp", inner), method, replicas=1, steps=STEPS)
        torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
def test_bmuf_is_slowmo_at_a_constant_rate(replicas: int) -> None:
    expected = bmuf(problem(), replicas=replicas, block=H, steps=STEPS, eta=0.5, zeta=0.9, nesterov=False)
    for anchor in train(
        problem(), SlowMo(sync_every=H, slow_lr=0.9, slow_momentum=0.5), replicas=replicas, steps=STEPS
    ):
        torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)


def test_bmufs_nesterov_variant_is_diloco() -> None:
    expected = bmuf(problem(), replicas=4, block=H, steps=STEPS, eta=0.5, zeta=0.9, nesterov=True)
    method = DiLoCo(sync_every=H, outer=SGD(lr=0.9, momentum=0.5, nesterov=True))
    for anchor in train(problem(), method, replicas=4, steps=STEPS):
        torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_snoo_is_diloco_of_one_replica(inner: str) -> None:
    expected = snoo(problem("mlp", inner), k=H, eta=0.8, mu=0.5, steps=STEPS)
    method = DiLoCo(sync_every=H, outer=SGD(lr=0.8, momentum=0.5, nesterov=True))
    (anchor,) = train(problem("mlp", inner), method, replicas=1, steps=STEPS)
    torch.testing.assert_close(anchor, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slow_lr": 0.0}, "above 0"),
        ({"slow_momentum": 1.0}, r"in \[0, 1\)"),
        ({"inner_state": "drop"}, "allowed: keep, reset, average"),
        ({"sync_every": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_use(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SlowMo(**settings)  # type: ignore[arg-type]
