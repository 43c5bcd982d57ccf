from __future__ import annotations

import pytest
import torch

from ftopt.methods import DiLoCo, ReplicaView, Round, SlowMo
from ftopt.outer import SGD
from tests.optimizer.running import train
from tests.problems import Problem, problem
from tests.reference.bmuf import bmuf
from tests.reference.lookahead import lookahead
from tests.reference.slowmo import slowmo
from tests.reference.snoo import snoo

H, STEPS = 10, 100


def _nesterov(task: Problem) -> Problem:
    """With the inner optimizer for which the paper resets buffers."""
    return Problem(task.model, lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True))


def _cosine(step: int) -> float:
    """Warms up, and ends in exactly 0 at step 70."""
    return 1e-3 * min(1.0, (step + 1) / 20) * max(0.0, 1 - step / 69)


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
    expected = slowmo(problem("mlp"), replicas=2, sync_every=H, steps=STEPS, alpha=1.0, beta=0.6, rate=_cosine)
    for anchor in train(problem("mlp"), method, replicas=2, steps=STEPS, rate=_cosine):
        assert all(torch.equal(a, b) for a, b in zip(anchor, expected, strict=True))
        assert all(bool(torch.isfinite(t).all()) for t in anchor)


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
