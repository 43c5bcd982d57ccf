"""Where one method is another, and what all of them are before ``average_until_step``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ftopt.fragments import Balanced, Strided
from ftopt.methods import DecoupledDiLoCo, DiLoCo, LocalSGD, Method, SlowMo, StreamingDiLoCo
from ftopt.outer import SGD
from ftopt.step.tensors.flat import parameters
from tests.optimizer.running import train_and_look
from tests.problems import problem
from tests.reference.codecs import Mean
from tests.reference.decoupled import radial
from tests.reference.diloco import diloco
from tests.reference.local_sgd import local_sgd
from tests.reference.slowmo import slowmo
from tests.reference.streaming import Combine, streaming

H, START, STEPS, LONG_S = 12, 20, 68, 60.0
PLAIN = SGD(lr=1.0)
TASK = problem("deep")
RULE = Balanced(n=3)
STREAM = {"sync_every": H, "fragments": RULE, "wait_for_result_s": LONG_S}

BIT_EQUAL: list[tuple[int, Method, Method]] = [
    (2, StreamingDiLoCo(sync_every=H, fragments=Strided(n=1), delay=0, outer=SGD()), DiLoCo(sync_every=H, outer=SGD())),
    (1, DecoupledDiLoCo(**STREAM, delay=2, adaptive_grace=0.0), StreamingDiLoCo(**STREAM, delay=2)),  # type: ignore[arg-type]
    (2, LocalSGD(sync_every=1), LocalSGD(sync_every=H, average_until_step=STEPS)),
]
EQUAL_TO_ROUNDING: list[tuple[int, Method, Method]] = [
    (2, SlowMo(sync_every=H, slow_momentum=0.0), LocalSGD(sync_every=H)),
    (2, DiLoCo(sync_every=H, outer=PLAIN), LocalSGD(sync_every=H)),
    (2, DiLoCo(sync_every=7, average_until_step=STEPS), LocalSGD(sync_every=1)),
]


def _run(method: Method, replicas: int, codec: str = "fp32") -> list[tuple[list[Tensor], list[Tensor]]]:
    ran = train_and_look(TASK, method, replicas=replicas, steps=STEPS, codec=codec)
    return [(one.params, one.anchor) for one in ran]


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "one", "other"), BIT_EQUAL, ids=["streaming", "decoupled", "local_sgd"])
def test_these_are_the_same_bit_for_bit(replicas: int, one: Method, other: Method) -> None:
    torch.testing.assert_close(_run(one, replicas), _run(other, replicas), rtol=0, atol=0)


@pytest.mark.parametrize(("replicas", "one", "other"), EQUAL_TO_ROUNDING, ids=["slowmo", "diloco", "averaging"])
def test_these_are_the_same_to_rounding(replicas: int, one: Method, other: Method) -> None:
    torch.testing.assert_close(_run(one, replicas), _run(other, replicas), rtol=0, atol=1e-6)


def test_one_replica_of_local_sgd_is_the_inner_optimizer_bit_for_bit() -> None:
    model = TASK.model(0)
    inner = TASK.inner(model.parameters())
    for step in range(STEPS):
        inner.zero_grad()
        TASK.backward(model, 0, step)
        inner.step()
    ((params, _),) = _run(LocalSGD(sync_every=H), 1)
    assert all(torch.equal(a, b) for a, b in zip(params, model.parameters(), strict=True))


def _streaming(combine: Combine | None, delay: int, mean: Mean) -> list[Tensor]:
    theta, _ = streaming(
        TASK,
        replicas=2,
        fragments=RULE.fragments(parameters(TASK.model(0))),
        sync_every=H,
        delay=delay,
        steps=STEPS,
        outer_start=START,
        combine=combine,
        mean=mean,
    )
    return list(theta.values())


POST_LOCAL: dict[str, tuple[Method, Callable[[Mean], list[Tensor]]]] = {
    "local_sgd": (
        LocalSGD(sync_every=H, average_until_step=START),
        lambda mean: local_sgd(TASK, replicas=2, sync_every=H, steps=STEPS, outer_start=START, mean=mean),
    ),
    "diloco": (
        DiLoCo(sync_every=H, outer="paper", average_until_step=START),
        lambda mean: diloco(TASK, replicas=2, sync_every=H, steps=STEPS, outer_start=START, mean=mean),
    ),
    "slowmo": (
        SlowMo(sync_every=H, average_until_step=START),
        lambda mean: slowmo(
            TASK, replicas=2, sync_every=H, steps=STEPS, alpha=1.0, beta=0.6, outer_start=START, mean=mean
        ),
    ),
    "streaming": (
        StreamingDiLoCo(**STREAM, delay=5, outer="paper", average_until_step=START),  # type: ignore[arg-type]
        lambda mean: _streaming(None, 5, mean),
    ),
    "decoupled": (
        DecoupledDiLoCo(**STREAM, delay=2, outer="paper", adaptive_grace=0.0, average_until_step=START),  # type: ignore[arg-type]
        lambda mean: _streaming(radial(), 2, mean),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *((name, "fp32") for name in POST_LOCAL),
        ("decoupled", "fp4"),
        *(pytest.param(name, "fp4", marks=pytest.mark.slow) for name in POST_LOCAL if name != "decoupled"),
    ],
)
def test_methods_average_every_step_until_they_start(name: str, codec: str) -> None:
    method, reference = POST_LOCAL[name]
    expected = reference(Mean(codec, names=[name for name, _ in TASK.model(0).named_parameters()]))
    for _, anchor in _run(method, 2, codec):
        torch.testing.assert_close(anchor, expected, rtol=0, atol=0)
