"""Numbers of replicas and strengths of error feedback that `test_every_method_with_every_codec` does not have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ftopt._connect import local_groups
from ftopt.methods import DiLoCo, Method, SparseLoCo
from ftopt.optimizer import wrap
from tests.optimizer.running import PATIENT, together
from tests.problems import Problem, flat, problem
from tests.reference.codecs import Mean
from tests.reference.diloco import diloco

H, STEPS = 10, 100
NAMES = ["bf16", "int8", "fp4", "top_k:0.1:4"]


def _train(task: Problem, method: Method, codec: str, *, replicas: int, feedback: float) -> list[Tensor]:
    models = [task.model(0) for _ in range(replicas)]
    groups, method = local_groups(replicas, policy=PATIENT), replace(method, codec=codec, error_feedback=feedback)

    def replica(m: int) -> Tensor:
        optimizer = wrap(task.inner(models[m].parameters()), models[m], method, group=groups[m])
        with optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                task.backward(models[m], m, step)
                optimizer.step()
            return flat(models[m])

    return together([lambda m=m: replica(m) for m in range(replicas)])


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "feedback"), [(2, 0.0), (3, 0.5)])
@pytest.mark.parametrize("codec", NAMES)
def test_diloco_with_less_error_feedback_equals_its_loop(codec: str, replicas: int, feedback: float) -> None:
    task = problem("mlp", "adamw")
    names = [name for name, _ in task.model(0).named_parameters()]
    mean = Mean(codec, feedback=feedback, names=names)
    expected = _flat(diloco(task, replicas=replicas, sync_every=H, steps=STEPS, mean=mean))
    for ours in _train(task, DiLoCo(sync_every=H, outer="paper"), codec, replicas=replicas, feedback=feedback):
        assert torch.equal(ours, expected), f"off by {float((ours - expected).abs().max())}"


def test_sparseloco_equals_its_loop_bit_for_bit() -> None:
    task, method = problem("wide", "adamw"), SparseLoCo(sync_every=H)
    names = [name for name, _ in task.model(0).named_parameters()]
    mean = Mean("top_k:0.015625:2", feedback=0.95, names=names)
    expected = _flat(diloco(task, replicas=3, sync_every=H, steps=STEPS, lr=1.0, momentum=0.0, mean=mean))
    for ours in _train(task, method, str(method.codec), replicas=3, feedback=method.error_feedback):
        assert torch.equal(ours, expected), f"off by {float((ours - expected).abs().max())}"


def test_a_lone_replica_loses_nothing_to_its_codec() -> None:
    task = problem("mlp", "adamw")
    method = DiLoCo(sync_every=H)
    exact = _train(task, method, "fp32", replicas=1, feedback=1.0)
    assert torch.equal(_train(task, method, "fp4", replicas=1, feedback=1.0)[0], exact[0])
