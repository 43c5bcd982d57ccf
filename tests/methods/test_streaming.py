from __future__ import annotations

import pytest
import torch

from ftopt.methods import Balanced, Named, Parameter, Sequential, StreamingDiLoCo, Strided
from ftopt.methods.fragments import Partition
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
        merge="rebase" if alpha is None else "mix",
        alpha=0.5 if alpha is None else alpha,
        patience_s=LONG_S,
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


@pytest.mark.parametrize("alpha", MERGES, ids=lambda alpha: f"alpha={alpha}" if alpha is not None else "rebase")
@pytest.mark.parametrize("delay", [0, 1, 5, 7])
@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_streaming_equals_its_paper_bit_for_bit(fragments: int, delay: int, alpha: float | None) -> None:
    _compare("adamw", Strided(n=fragments), replicas=2, delay=delay, alpha=alpha)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("inner", ["adamw", "sgd"])
@pytest.mark.parametrize("rule", [Sequential(n=3), Balanced(n=4), Named(patterns=["3", "*"])], ids=repr)
def test_other_partitions_and_numbers_of_replicas_do_so_too(rule: Partition, inner: str, replicas: int) -> None:
    _compare(inner, rule, replicas=replicas, delay=5, alpha=None)
