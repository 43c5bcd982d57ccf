"""Is it time? Pure predicates on where a replica stands; the clock and the counters are somebody else's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a replica stands with one fragment, at a boundary between two inner steps.

    Args:
        fragment: the fragment.
        steps: inner steps since the last proposal or take-over of the fragment, whichever came later.
        pending_steps: inner steps that no committed state has counted yet.
        local_steps: inner steps executed in this incarnation.
        inner_step: the job's committed inner step plus the pending ones.
    """

    fragment: int
    steps: int
    pending_steps: int
    local_steps: int
    inner_step: int


def every(steps: int, progress: Progress) -> bool:
    """True from the ``steps``-th inner step after the last proposal or take-over on."""
    return progress.steps >= steps


def check_sync_every(sync_every: int) -> None:
    """Refuses a period that is no positive number of inner steps.

    Raises:
        ValueError: ``sync_every`` is not an int of at least 1.
    """
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(
            f"sync_every={sync_every!r}; must be a whole number of inner steps, at least 1; "
            "use 1 to meet after every step, 500 for DiLoCo's default"
        )
