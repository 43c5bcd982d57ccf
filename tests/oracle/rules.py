"""What the papers do to one fragment's anchor in a round: lists of tensors in, lists of tensors out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle.scenario import Outer, Spec

Tensors = list[Tensor]


@dataclass(frozen=True)
class Part:
    """What one replica brings to a round."""

    start: Tensors
    """The anchor in the parameters' precision: where it started from."""
    now: Tensors
    """Its parameters."""
    weight: float
    rate: float
    """The mean learning rate of the steps that it brings."""


def mean(lists: list[Tensors], weights: list[float]) -> Tensors:
    """Weighted, tensor by tensor."""
    total = sum(weights)
    result = [torch.zeros_like(t) for t in lists[0]]
    for tensors, weight in zip(lists, weights, strict=True):
        for k, t in enumerate(tensors):
            result[k] = result[k] + (weight / total) * t
    return result


def displacements(parts: list[Part], like: Tensors) -> list[Tensors]:
    """Each replica's outer gradient, ``start - now``."""
    return [
        [a.to(t.dtype) - p.to(t.dtype) for a, p, t in zip(part.start, part.now, like, strict=True)] for part in parts
    ]


class Rule:
    """Plain averaging of the parameters: local SGD (1805.09767), and the average of PAFT."""

    def __init__(self, spec: Spec, names: list[str]) -> None:
        self.spec = spec
        self.names = names

    def next(self, anchor: Tensors, parts: list[Part]) -> Tensors:
        """The anchor after a round."""
        return self.average(anchor, parts)

    def average(self, anchor: Tensors, parts: list[Part]) -> Tensors:
        """The plain average, for the synchronous start of any method (1808.07217)."""
        delta = mean(displacements(parts, anchor), [part.weight for part in parts])
        return [a - d for a, d in zip(anchor, delta, strict=True)]


class ParameterMean(Rule):
    """PAFT: the average of the parameters as they are. In float64 it is the plain average."""

    def average(self, anchor: Tensors, parts: list[Part]) -> Tensors:
        now = [[p.to(a.dtype) for p, a in zip(part.now, anchor, strict=True)] for part in parts]
        return mean(now, [part.weight for part in parts])


class DiLoCo(Rule):
    """2311.08105, algorithm 1: the mean displacement is the gradient of an outer optimizer."""

    def __init__(self, spec: Spec, names: list[str]) -> None:
        super().__init__(spec, names)
        self.outer = ReplicaOptimizer(spec.outer)

    def next(self, anchor: Tensors, parts: list[Part]) -> Tensors:
        return self.outer.step(anchor, self.aggregate(displacements(parts, anchor), [part.weight for part in parts]))

    def aggregate(self, deltas: list[Tensors], weights: list[float]) -> Tensors:
        """The replicas' outer gradients as one."""
        return mean(deltas, weights)


class Decoupled(DiLoCo):
    """2604.21428: directions and lengths are averaged separately, tensor by tensor; embeddings plainly."""

    def aggregate(self, deltas: list[Tensors], weights: list[float]) -> Tensors:
        if sum(weight > 0 for weight in weights) == 1:
            return mean(deltas, weights)
        plain = mean(deltas, weights)
        lengths = mean([[t.norm() for t in tensors] for tensors in deltas], weights)
        directions = mean([[_unit(t) for t in tensors] for tensors in deltas], weights)
        result = []
        for name, average, length, direction in zip(self.names, plain, lengths, directions, strict=True):
            if name.startswith("table"):
                result.append(average)
            elif direction.norm() < 1e-3:  # the paper: a plain mean where directions cancel
                result.append(length * direction)
            else:
                result.append(length * _unit(direction))
        return result


def _unit(t: Tensor) -> Tensor:
    length = t.norm()
    return t / length if length > 0 else t


class SlowMo(Rule):
    """1910.00643, algorithm 1; its gamma is the mean rate of the round's steps."""

    def __init__(self, spec: Spec, names: list[str]) -> None:
        super().__init__(spec, names)
        self.u: Tensors | None = None

    def next(self, anchor: Tensors, parts: list[Part]) -> Tensors:
        weights = [part.weight for part in parts]
        delta = mean(displacements(parts, anchor), weights)
        gamma = sum(part.weight * part.rate for part in parts) / sum(weights)
        alpha = self.spec.slow_lr
        if gamma == 0:
            return [a - alpha * d for a, d in zip(anchor, delta, strict=True)]
        u = self.u or [torch.zeros_like(a) for a in anchor]
        self.u = [self.spec.slow_momentum * old + d / gamma for old, d in zip(u, delta, strict=True)]
        return [a - alpha * gamma * new for a, new in zip(anchor, self.u, strict=True)]


class ReplicaOptimizer:
    """SGD, heavy ball or Nesterov, and Adam (1412.6980)."""

    def __init__(self, settings: Outer) -> None:
        self.settings = settings
        self.steps = 0
        self.first: Tensors = []
        self.second: Tensors = []

    def step(self, anchor: Tensors, delta: Tensors) -> Tensors:
        """The next anchor."""
        self.steps += 1
        if self.steps == 1:
            self.first = [torch.zeros_like(d) for d in delta]
            self.second = [torch.zeros_like(d) for d in delta]
        rate = self.settings.rate(self.steps)
        move = self._adam(delta) if self.settings.kind == "adam" else self._sgd(delta)
        return [a - rate * m for a, m in zip(anchor, move, strict=True)]

    def _sgd(self, delta: Tensors) -> Tensors:
        mu = self.settings.momentum
        self.first = [mu * u + d for u, d in zip(self.first, delta, strict=True)]
        if self.settings.nesterov:
            return [d + mu * u for u, d in zip(self.first, delta, strict=True)]
        return self.first

    def _adam(self, delta: Tensors) -> Tensors:
        b1, b2 = self.settings.betas
        self.first = [b1 * m + (1 - b1) * d for m, d in zip(self.first, delta, strict=True)]
        self.second = [b2 * v + (1 - b2) * d * d for v, d in zip(self.second, delta, strict=True)]
        c1, c2 = 1 - b1**self.steps, math.sqrt(1 - b2**self.steps)
        return [m / c1 / (v.sqrt() / c2 + self.settings.eps) for m, v in zip(self.first, self.second, strict=True)]


RULES: dict[str, type[Rule]] = {
    "local_sgd": Rule,
    "diloco": DiLoCo,
    "streaming": DiLoCo,
    "decoupled": Decoupled,
    "slowmo": SlowMo,
    "paft": ParameterMean,
}
