"""PAFT's replicas take each step alike: one that joins, or was cut off, goes on from what the others have by then."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import ftopt
from ftopt._connect import local_groups
from ftopt.events import Event
from tests.optimizer.running import PATIENT, together
from tests.problems import problem

POLICY = ftopt.FaultPolicy(start_replicas=3, grace_s=0.5, dead_after_s=60.0, heartbeat_s=0.1)
Held = dict[int, list[Tensor]]
"""Version of the gradients -> the parameters and the moments after its step."""


class Run:
    """Replicas r0, r1, r2, and a joiner r3 at version ``join_at``; they stop at version ``until`` of the gradients."""

    def __init__(
        self,
        method: ftopt.PAFT,
        *,
        inner: str = "sgd",
        join_at: int | None = None,
        until: int = 1 << 40,
        boundary: Callable[[Run, int, int], None] = lambda run, m, step: None,
    ) -> None:
        self.task, self.method, self.until, self.boundary = problem("mlp", inner), method, until, boundary
        self.join_at = join_at
        self.events: list[Event] = []
        self.held: dict[int, Held] = defaultdict(dict)
        self.steps: dict[int, int] = {}
        self.may_join = threading.Event()
        self.groups: list[Any] = local_groups(4, policy=POLICY, on_event=self.events.append)
        count = 3 if join_at is None else 4
        self.barrier = threading.Barrier(count, timeout=60.0)
        together([lambda m=m: self._replica(m) for m in range(count)])

    def _replica(self, m: int) -> None:
        model = self.task.model(0)
        optimizer = self.task.inner(model.parameters())
        outer = ftopt.wrap(optimizer, model, self.method, group=self.groups[m])
        if m == 3:
            assert self.may_join.wait(60.0)
        with outer:
            gradients = outer._core.started().gradients
            assert gradients is not None
            while outer.status.versions[0] < self.until:
                self.boundary(self, m, outer.status.versions[0])
                outer.zero_grad()
                self.task.backward(model, m, outer.status.versions[0])
                outer.step()
                state = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, Tensor)]
                held = [t.detach().clone() for t in (*model.parameters(), *state)]
                self.held[m][gradients.applied.meta.version] = held
                if m == 0 and self.join_at is not None and outer.status.versions[0] >= self.join_at:
                    self.may_join.set()
            with outer.busy("done"):
                self.barrier.wait()

    def common(self, m: int, after: int = 0) -> list[int]:
        """Versions that the replica and r0 have held so far; any thread."""
        return sorted(v for v in {*self.held[m].copy()} & {*self.held[0].copy()} if v > after)

    def distances(self, m: int, after: int = 0) -> dict[int, float]:
        """How far the replica is from r0, by version."""
        pairs = {v: zip(self.held[m][v], self.held[0][v], strict=True) for v in self.common(m, after)}
        return {v: max(float((a - b).abs().max()) for a, b in pair) for v, pair in pairs.items()}


@pytest.mark.long
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
@pytest.mark.parametrize("every", [10, 1000])
def test_a_joiner_has_the_parameters_and_moments_of_the_others_from_its_first_step(
    every: int, inner: str, delay: int
) -> None:
    def boundary(run: Run, m: int, step: int) -> None:
        if m == 3 and len(run.common(3)) >= 5:  # it may miss rounds
            run.until = min(run.until, step + 15)

    run = Run(ftopt.PAFT(sync_every=every, delay=delay), inner=inner, join_at=25, boundary=boundary)
    distances = run.distances(3)
    assert len(distances) >= 5
    assert max(distances.values()) <= 1e-5, distances


@pytest.mark.long
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("every", [10, 1000])
def test_one_that_was_cut_off_has_them_when_it_is_back(every: int, delay: int) -> None:
    cut = list[int]()

    def boundary(run: Run, m: int, step: int) -> None:
        if m == 2 and step >= 15 and not cut:
            cut.append(max(run.held[2]))
            run.groups[2].cut(1.0)
        if m == 2 and cut and len(run.common(2, after=cut[0] + 2)) >= 5:  # it is back, and has missed some
            run.until = min(run.until, step + 15)

    run = Run(ftopt.PAFT(sync_every=every, delay=delay), inner="adamw", boundary=boundary)
    distances = list(run.distances(2, after=cut[0] + 2).values())
    assert len(distances) >= 5
    assert distances[0] <= 1e-5 and distances[-1] <= 1e-5, distances
    # All the steps that it was cut off for are counted at once: others may then average a step before it does.
    assert max(distances) <= 5e-3, distances


def test_a_gradient_that_is_used_up_is_no_part_of_the_anchor_digest() -> None:
    """One that fetches a model behind its step has not seen the gradient that made it."""
    task, groups = problem("mlp", "sgd"), local_groups(2, policy=PATIENT)
    digests, gradients, barrier = list[str](), list[Tensor](), threading.Barrier(2, timeout=60.0)

    def replica(m: int) -> None:
        model = task.model(0)
        inner = task.inner(model.parameters())
        optimizer = ftopt.wrap(inner, model, ftopt.PAFT(sync_every=4), group=groups[m])
        with optimizer:
            for step in range(4):
                optimizer.zero_grad()
                task.backward(model, m, step)
                optimizer.step()
            fragment = optimizer._core.started().gradients
            assert fragment is not None
            if m:
                fragment.state.outer["gradient"].mul_(2.0)
            gradients.append(fragment.state.outer["gradient"].clone())
            digests.append(optimizer.digest())
            barrier.wait()

    together([lambda m=m: replica(m) for m in range(2)])
    assert not gradients[0].equal(gradients[1]) and digests[0] == digests[1]
