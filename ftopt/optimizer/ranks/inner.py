"""A rank's inner optimizers, and the values of parameter groups that must be equal on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.step.inner import Inner


class Steps(Protocol):
    """The ranks, as the inner optimizers use them."""

    def stepping(self) -> AbstractContextManager[None]:
        """Surrounds a step."""

    def changing(self) -> None:
        """Called when the inner optimizers change something outside a step."""

    def cleared(self) -> None:
        """Called when the gradients have been cleared."""

    def may_set_up(self) -> bool:
        """Whether a step may be one that only sets up the inner state."""


class RankInner(Inner):
    """A rank's inner optimizers, whose state all ranks treat in the same way."""

    def __init__(self, optimizers: Sequence[Optimizer], ranks: Steps) -> None:
        super().__init__(optimizers)
        self._ranks = ranks

    def step(self, closure: Callable[[], Any] | None) -> Any:
        with self._ranks.stepping():
            return super().step(closure)

    def is_empty_step(self) -> bool:
        return self._ranks.may_set_up() and super().is_empty_step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self._ranks.cleared()

    def reset_state(self) -> None:
        super().reset_state()
        self._ranks.changing()

    def forget_nonfinite_state(self) -> None:
        """Resets all inner state, since one rank cannot tell whether another's part is finite."""
        self.reset_state()


def check_groups(found: Sequence[list[list[dict[str, Any]]]]) -> None:
    """Raises UserError if a rank's rates differ from rank 0's. ``found``: `groups_of` each rank."""
    mine = found[0]
    for rank, groups in enumerate(found):
        pairs = zip(itertools.chain(*mine), itertools.chain(*groups), strict=True)
        for i, (own, theirs) in enumerate(pairs):
            for key in own.keys() | theirs.keys():
                if not _alike(own.get(key), theirs.get(key)):
                    raise UserError(
                        f"parameter group {i} has {key}={own.get(key)!r:.40} on rank 0 and "
                        f"{theirs.get(key)!r:.40} on rank {rank}; the ranks of a replica take each step alike: "
                        "make and step the same schedulers on all of them"
                    )


def groups_of(inner: Inner) -> list[list[dict[str, Any]]]:
    """The values of all groups, without the parameters."""
    return [[_values(group) for group in optimizer.param_groups] for optimizer in inner.optimizers]


def set_groups(inner: Inner, values: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Sets the result of `groups_of`."""
    for optimizer, each in zip(inner.optimizers, values, strict=True):
        for group, own in zip(optimizer.param_groups, each, strict=True):
            group.update(own)


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _alike(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
