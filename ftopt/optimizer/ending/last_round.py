"""The last round of a job with a planned end."""

from __future__ import annotations

from typing import Any, Protocol


class _Optimizer(Protocol):
    @property
    def status(self) -> Any: ...  # `Status`

    @property
    def pending_steps(self) -> int: ...

    def sync(self) -> bool: ...


def last_round(optimizer: _Optimizer, planned: int) -> bool:
    """Takes part in a last round, with which the job reaches the inner step ``planned``. Returns whether the pending
    steps are still to be offered: not if the job is at its end, and they are beyond it."""
    if len(optimizer.status.versions) == 1 and optimizer.status.committed_step >= planned:
        return optimizer.pending_steps == 0
    optimizer.sync()
    return True
