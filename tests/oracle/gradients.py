"""Methods that exchange gradients: the synchronous baseline, and PAFT (OpenReview cPZepCZlFW)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from tests.oracle.oracle import Oracle, Replica, clip, due
from tests.oracle.problems import noise
from tests.oracle.rules import Rule, mean
from tests.oracle.scenario import Change


class GradientOracle(Oracle):
    """Every replica takes its inner step with the mean of all gradients."""

    def _rule(self, indices: list[int]) -> Rule:
        return super()._rule(indices) if self.spec.kind == "paft" else Rule(self.spec, [])

    def _change(self, change: Change) -> None:
        """Who joins has the model and the inner state that all have: they take the same steps."""
        super()._change(change)
        if change.kind == "join":
            newcomer, peer = self.live[-1], self.live[0]
            for p, there in zip(newcomer.parameters, peer.parameters, strict=True):
                p.data.copy_(there)
            newcomer.optimizer.load_state_dict(copy.deepcopy(peer.optimizer.state_dict()))
        if self.spec.kind == "paft":
            self.leaving = []  # what it has done is in the model of all the others

    def _inner(self, tick: int) -> None:
        for replica in self.live:
            if (tick, replica.number) not in self.scenario.skips:
                replica.backward(self.scenario, tick)
                self._add_up(replica)
        if self.spec.kind == "paft" or due(self.spec, 0, tick):
            self._exchange(tick)

    def _add_up(self, replica: Replica) -> None:
        replica.passes += 1
        for k, p in enumerate(replica.parameters):
            if p.grad is not None:
                before = replica.sums[k]
                replica.sums[k] = p.grad.to(self.dtype) if before is None else before + p.grad.to(self.dtype)

    def _exchange(self, tick: int) -> None:
        members = [r for r in self.live + self.leaving if r.passes]
        gradients: list[Tensor | None] = []
        for k, a in enumerate(self.anchor):
            if all(r.sums[k] is None for r in members):
                gradients.append(None)
                continue
            zero = torch.zeros_like(a)
            each = [[_or(r.sums[k], zero) / r.passes] for r in members]
            gradients.append(mean(each, [r.passes if self.spec.weights == "steps" else 1 for r in members])[0])
        if self.spec.clip is not None:
            clip(gradients, self.spec.clip)
        for replica in self.live:
            for k, (p, g) in enumerate(zip(replica.parameters, gradients, strict=True)):
                p.grad = None if g is None else g.to(p.dtype)
                if self.scenario.noisy and p.grad is not None:
                    p.grad = p.grad + noise(replica.number, tick, p, k)
            replica.optimizer.step()
        for replica in members:
            replica.sums, replica.passes = [None] * len(self.anchor), 0
        self.leaving = [] if self.spec.kind == "sync_sgd" else self.leaving

    def _round(self, f: int, tick: int) -> None:
        if self.spec.kind == "paft":
            super()._round(f, tick)
        else:
            self.anchor = [p.detach().to(self.dtype) for p in self.live[0].parameters]


def _or(sum_: Tensor | None, zero: Tensor) -> Tensor:
    return zero if sum_ is None else sum_
