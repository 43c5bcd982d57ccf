"""Steps of inner optimizers that the wrapped optimizer does not take: the log tells the user of the first one.

The job counts the steps of the wrapped optimizer alone. A loop that steps an inner one (in the backward pass, in a
trainer that was given it, by SAM's two half-steps) trains without outer steps. `close` says so, too, but a job that is
killed at its time limit never closes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ftopt.step.inner import Inner
from ftopt.sync.group import ReplicaGroup

_log = logging.getLogger(__name__)


class _Started(Protocol):
    @property
    def started(self) -> bool: ...


class Stepped(Protocol):
    """An optimizer's core: what tells which steps are the user's own affair.

    Attributes:
        suspended: in so many `OuterOptimizer.suspended` blocks.
        closed: it has left.
    """

    inner: Inner
    suspended: int
    closed: bool

    @property
    def group(self) -> ReplicaGroup | None:
        """None in a copy."""

    def standing(self) -> _Started:
        """Whether it has started."""


class _Beside:
    """A hook behind each step of an inner optimizer; one for all of a wrapped one. It holds nothing of the job."""

    def __init__(self, core: Stepped) -> None:
        self._core, self._inner = weakref.ref(core), weakref.ref(core.inner)
        self._told = False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        inner = self._inner()
        if inner is None or inner.stepping or self._told or torch.compiler.is_compiling():
            return
        core = self._core()
        if core is None or core.group is None or core.closed or core.suspended or not core.standing().started:
            return
        if not any(group.get("lr", 1.0) for group in optimizer.param_groups):
            return  # it sets up the state, and moves nothing
        self._told = True
        _log.warning(
            "replica %s: an inner optimizer (%s) was stepped by itself: the job counts no such step, and no outer step "
            "comes after it; call step() of what ftopt.wrap() returns in its place, once for each batch, also in a "
            "trainer and instead of an optimizer in the backward pass; put steps that shall not count into `with "
            "optimizer.suspended():`",
            core.group.replica,
            type(optimizer).__name__,
        )


def tell_steps_beside(core: Stepped) -> None:
    """From the start of ``core`` to its end the first step of an inner optimizer that it does not take is told."""
    hook = _Beside(core)
    for optimizer in _with_their_own(core.inner):
        if hasattr(optimizer, "_optimizer_step_post_hooks"):  # else it has never called Optimizer.__init__
            optimizer.register_step_post_hook(hook)


def _with_their_own(inner: Inner) -> Iterator[Optimizer]:
    """The inner optimizers, and those with the same groups inside of them (SAM's, Lookahead's)."""
    for optimizer in inner.optimizers:
        yield optimizer
        groups = [id(group) for group in optimizer.param_groups]
        for value in vars(optimizer).values():
            if isinstance(value, Optimizer) and [id(group) for group in value.param_groups] == groups:
                yield value
