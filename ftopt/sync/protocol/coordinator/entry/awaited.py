"""Sentences about the members for which a job's startup phase waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ftopt.sync.protocol.coordinator.roster.roster import Member

NAMED = 5
"""The most replicas that a sentence names."""


def awaits_silent(awaited: Sequence[Member], since_loss_s: float) -> str:
    """Says why the job waits for former processes whose ids others claim. ``since_loss_s``: how long after a member's
    loss the wait ends, less the present time."""
    return (
        f"the former process of {names_of(awaited)} has fallen silent, and it alone holds the newest version: its "
        f"return is waited for, {_left_s(awaited, since_loss_s):.0f} s at most (policy.evict_after_s); if it is dead, "
        "start the replica with FTOPT_FORMER_ENDED=1, which ends the wait"
    )


def awaits(awaited: Sequence[Member], since_loss_s: float, *, newer: bool) -> str:
    """Says why the job waits for these members, how long at most, and how to end the wait. ``newer``: a replica that is
    here holds a state of the job. ``since_loss_s``: see `awaits_silent`."""
    holds = "hold a newer version than all that are here" if newer else (
        "hold the job's state, and steps that no checkpoint has"
    )  # fmt: skip
    one, several = ("it still runs, it may", "it has", "a replica with this id"), (
        "they still run, they may", "they have", "replicas with these ids")  # fmt: skip
    run_may, have, replicas = one if len(awaited) == 1 else several
    return (
        f"waiting for {names_of(awaited)}, {_left_s(awaited, since_loss_s):.0f} s at most (policy.evict_after_s): if "
        f"{run_may} {holds}. If {have} ended, start {replicas} again, which ends the wait"
    )


def _left_s(awaited: Sequence[Member], since_loss_s: float) -> float:
    return max(0.0, max(x.lost_s for x in awaited) + since_loss_s)


def names_of(members: Iterable[Member]) -> str:
    """The first of their ids, in order."""
    return first([x.replica for x in members])


def first(names: list[str]) -> str:
    """The first names, in order."""
    return ", ".join(sorted(names)[:NAMED])
