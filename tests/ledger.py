"""Groups of a job with a sample ledger, for tests without a `ftopt.DataLoader`."""

from __future__ import annotations

from ftopt.sync.group import ReplicaGroup, Samples


def with_ledger(groups: list[ReplicaGroup], samples: Samples | None) -> list[ReplicaGroup]:
    """The same groups, whose job now hands out ``samples``; None: it hands out nothing."""
    if samples is None:
        return groups
    for group in groups:
        if samples.global_batch is None:
            group.keep_ledger(samples)
        else:
            group.keep_global_batch(samples)
    return groups
