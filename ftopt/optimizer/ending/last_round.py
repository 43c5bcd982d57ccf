"""The last round of a job with a planned end."""

from __future__ import annotations

from typing import Any, Protocol


class _Optimizer(Protocol):
    @property
    def status(self) -> Any: ...  # `Status`

    @property
    def pending_steps(self) -> int: ...

    def sync(self, *, propose: bool = True) -> bool: ...


def last_round(optimizer: _Optimizer, planned: int) -> bool:
    """Takes part in a last round, with which the job reaches the inner step ``planned``. Returns whether the pending
    steps are still to be offered: not if the job is at its end, and they are beyond it."""

    def is_there() -> bool:
        return len(optimizer.status.versions) == 1 and optimizer.status.committed_step >= planned

    if optimizer.status.started and not is_there():
        optimizer.sync(propose=False)  # with what a call-in has taken the job may be there
    if not is_there():
        optimizer.sync()
    return not is_there() or optimizer.pending_steps == 0
