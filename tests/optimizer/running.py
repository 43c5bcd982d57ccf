"""Runs replicas as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from ftopt._connect import local_groups
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.sync.group import ReplicaGroup
from ftopt.sync.protocol.policy import FaultPolicy
from tests.problems import Problem

T = TypeVar("T")

Noise = Callable[[int, int, list[Tensor]], None]
"""(replica, step, gradients): changes the gradients in place. Steps count from 1."""

PATIENT = FaultPolicy(grace_s=60.0, dead_after_s=60.0, stragglers="wait")
"""Nobody is called in and nobody is lost, however busy the machine is: what comes out depends on the steps alone."""


def patient_solo() -> ReplicaGroup:
    """`solo` that is not lost either: it would train on for a while, and its rounds would be others."""
    return local_groups(1, policy=PATIENT)[0]


def together(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Runs the tasks at once, a thread each; the first error is raised."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(timeout=240) for future in [pool.submit(task) for task in tasks]]


def train(
    problem: Problem,
    method: Method,
    *,
    replicas: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    rate: Callable[[int], float] | None = None,
) -> list[list[Tensor]]:
    """Trains replicas on their own batches; returns each one's anchor when all have left, tensor by tensor."""
    ran = train_and_look(problem, method, replicas=replicas, steps=steps, dtype=dtype, rate=rate)
    return [trained.left for trained in ran]


@dataclass(frozen=True)
class Trained:
    """Of one replica, tensor by tensor: the parameters and the anchor after the last step, and the anchor when the
    pending steps have been flushed."""

    params: list[Tensor]
    anchor: list[Tensor]
    left: list[Tensor]


def train_and_look(
    problem: Problem,
    method: Method,
    *,
    replicas: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    rate: Callable[[int], float] | None = None,
    codec: str = "fp32",
    noise: Noise | None = None,
) -> list[Trained]:
    """Trains replicas on their own batches.

    Args:
        rate: the inner rate after so many steps. Default: the optimizer's.
        noise: of a method that exchanges gradients: spoils a replica's copy of the agreed one.
    """
    models = [problem.model(0).to(dtype) for _ in range(replicas)]  # Here: the global seed is the process'.

    def on_event(event: Event) -> None:
        if noise is not None and event.event == "aggregated":
            m = int(event.replica[1:])
            noise(m, event.inner_step, [p.grad for p in models[m].parameters() if p.grad is not None])

    method = replace(method, codec=codec)
    groups = local_groups(replicas, policy=PATIENT, on_event=on_event)
    all_have_looked = threading.Barrier(replicas, timeout=60.0)

    def replica(m: int) -> Trained:
        model = models[m]
        optimizer = wrap(problem.inner(model.parameters()), model, method, group=groups[m])
        with optimizer:
            for step in range(steps):
                if rate is not None:
                    optimizer.param_groups[0]["lr"] = rate(step)
                optimizer.zero_grad()
                problem.backward(model, m, step)
                optimizer.step()
            params = [p.detach().clone() for p in model.parameters()]
            for index in range(len(optimizer.status.versions)):
                groups[m].wait(index)
            last = anchor(optimizer, model)
            all_have_looked.wait()  # who leaves sooner hands in its pending steps
        return Trained(params, last, anchor(optimizer, model))

    return together([lambda m=m: replica(m) for m in range(replicas)])


def note_digest(digests: dict[int, str], optimizer: ReplicaOptimizer) -> None:
    """The digest of the version that it holds, unless that changes meanwhile."""
    version, digest = optimizer.status.versions[0], optimizer.digest()
    if optimizer.status.versions[0] == version:
        digests[version] = digest


def anchor(optimizer: ReplicaOptimizer, model: nn.Module) -> list[Tensor]:
    """The committed anchor, fp32, of each parameter that trains."""
    found = {}
    for fragment in optimizer._core.started().fragments:
        for span in fragment.view.layout:
            found[span.name] = fragment.state.anchor[span.start : span.stop]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [found[name].view(parameter.shape).clone() for name, parameter in trained]
