"""The last round of a job with a planned end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from ftopt.sync.group import Committed


class _Optimizer(Protocol):
    @property
    def versions(self) -> tuple[int, ...]: ...

    @property
    def committed(self) -> Committed: ...

    @property
    def pending_steps(self) -> int: ...

    def sync(self) -> bool: ...

    def outer_parameters(self) -> AbstractContextManager[None]: ...


def last_round(optimizer: _Optimizer, planned: int) -> bool:
    """Takes part in a last round, with which the job reaches the inner step ``planned``. Returns whether the pending
    steps are still to be handed in: not if the job is at its end, and they are beyond it."""
    if len(optimizer.versions) == 1 and optimizer.committed.inner_step >= planned:
        return optimizer.pending_steps == 0
    optimizer.sync()
    return True


@torch.no_grad()
def keep_outer_parameters(optimizer: _Optimizer, model: nn.Module) -> None:
    """Leaves the outer parameters, and the buffers that are averaged, in the model of a replica that has left."""
    own: list[Tensor] = [*model.parameters(), *model.buffers()]
    with optimizer.outer_parameters():
        outer = [tensor.detach().clone() for tensor in own]
    for tensor, values in zip(own, outer, strict=True):
        tensor.copy_(values)
