"""Detects steps of inner optimizers that the wrapped optimizer does not take; the log reports the first one.

The job counts the steps of the wrapped optimizer alone. A loop that steps an inner one (in the backward pass, in a
trainer that was given it, by SAM's two half-steps) trains without outer steps. `close` reports this, too, but a job
that is killed at its time limit never closes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ftopt.optimizer.training import Training
from ftopt.step.inner import Inner

_log = logging.getLogger(__name__)


class _Beside:
    """A hook after each step of an inner optimizer, shared by all inner optimizers of a wrapped one. It keeps no part
    of the job alive."""

    def __init__(self, training: Training) -> None:
        self._training, self._inner = weakref.ref(training), weakref.ref(training.inner)
        self._warned = False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        inner = self._inner()
        if inner is None or inner.stepping or self._warned or torch.compiler.is_compiling():
            return
        training = self._training()
        if training is None or training.group is None or training.outer is None:
            return
        if training.closed or training.suspended:
            return
        if not any(group.get("lr", 1.0) for group in optimizer.param_groups):
            return  # it only sets up the state
        self._warned = True
        _log.warning(
            "replica %s: an inner optimizer (%s) was stepped by itself: the job counts no such step, and no outer step "
            "comes after it; call step() of what ftopt.wrap() returns in its place, once for each batch, also in a "
            "trainer and instead of an optimizer in the backward pass; put steps that shall not count into `with "
            "optimizer.suspended():`",
            training.group.replica,
            type(optimizer).__name__,
        )


def warn_of_steps_beside(training: Training) -> None:
    """Warns of the first step of an inner optimizer that the wrapped one does not take, from the start to the end."""
    hook = _Beside(training)
    for optimizer in _with_their_own(training.inner):
        if hasattr(optimizer, "_optimizer_step_post_hooks"):  # else Optimizer.__init__ was never called
            optimizer.register_step_post_hook(hook)


def _with_their_own(inner: Inner) -> Iterator[Optimizer]:
    """The inner optimizers, and the optimizers inside them that have the same groups (SAM's, Lookahead's)."""
    for optimizer in inner.optimizers:
        yield optimizer
        groups = [id(group) for group in optimizer.param_groups]
        for value in vars(optimizer).values():
            if isinstance(value, Optimizer) and [id(group) for group in value.param_groups] == groups:
                yield value
