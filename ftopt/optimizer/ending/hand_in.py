"""A leaving replica hands in its pending steps, waits for others that end, and logs losses."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ftopt.common.plural import count
from ftopt.optimizer.asked import by_environment
from ftopt.step.outer.step import OuterStep
from ftopt.sync.group import End, ReplicaGroup

_log = logging.getLogger(__name__)

_POLL_S = 0.005
_EARLY = 0.75
_CONNECTED_BY = ("COORDINATOR", "JOB", "HOST", "INTERFACE", "CA", "CERT", "KEY")
"""The variables that `ftopt.connect` reads, except the replica's id, and the token, which no log may show."""


def hand_in(
    outer: OuterStep,
    group: ReplicaGroup,
    largest_lr: Callable[[], float],
    deadline: float,
    clock: Callable[[], float],
    *,
    early: bool,
) -> None:
    """Offers pending steps and waits until none are left, or until ``deadline`` by ``clock``.

    A leaver's proposal opens no round, since replicas that end together would each open one. ``early``: this replica
    ends before the others, whose next round may be hours away, so it opens one before it announces that it leaves, for
    three quarters of the time. Not where replicas exchange gradients: rounds are short there, and the others would wait
    for it.
    """
    if early and outer.gradients is None and group.global_batch is None:
        outer.report("waiting")
        _offer(outer, group, largest_lr, clock() + _EARLY * (deadline - clock()), clock)
    outer.report("leaving")  # before any proposal, so that it opens no round and no round waits for it
    _offer(outer, group, largest_lr, deadline, clock)


def end_together(
    outer: OuterStep, group: ReplicaGroup, *, but: Sequence[str], timeout_s: float, until: Callable[[], bool]
) -> Callable[[], None]:
    """Called when the loop has ended and pending steps are handed in. Waits for the others that end, too (END), and
    applies the newest version, with which all leave. Leaves time to save it. Returns a function that logs the
    outcome."""
    began = time.monotonic()
    end = group.wait_for_end(outer.inner_step(), but=but, timeout_s=_EARLY * timeout_s, until=until)
    outer.apply()
    if group.closed or until():
        return lambda: None
    return partial(_warn_end, outer, group.replica, end, time.monotonic() - began)


def _warn_end(outer: OuterStep, replica: str, end: End | None, waited_s: float) -> None:
    """Logs the version with which a replica ends, and whether the others end with it."""
    meta = outer.fragments[0].state.meta
    at = f"replica {replica} ends with version {meta.version}, inner step {meta.inner_step}"
    if end is None or end.awaited or not end.whole:
        whom = "" if end is None else ", ".join(end.awaited) or "the newest version"
        missing = f"after {waited_s:.1f} s there is no answer from {whom}" if whom else "no coordinator has answered"
        _log.warning("%s: %s: the final weights of others may be those of another version", at, missing)
    elif end.differ:
        text = "%s: %s ended with another one: the final weights differ; use those of the later version"
        _log.warning(text, at, ", ".join(end.differ))
    elif len(end.alike) > 1:
        _log.warning("%s: final weights of %d replicas: identical", at, len(end.alike))


def patience_s(group: ReplicaGroup) -> float:
    """Maximum seconds to wait for the decision on a leaver's steps. For a share of a global batch, only as long as a
    round may wait for the replicas with the rest: when all leave at once, nobody computes it."""
    return math.inf if group.global_batch is None else group.policy.grace_s + group.policy.dead_after_s


def _offer(
    outer: OuterStep, group: ReplicaGroup, largest_lr: Callable[[], float], deadline: float, clock: Callable[[], float]
) -> None:
    """Offers pending steps until they are decided or ``deadline`` passes. A round under way may end without this
    replica's last steps, which are then offered to the next one. Steps that a round did not take are not offered to it
    again. A version being fetched comes first, since nothing can be offered to an older one. A closed group takes
    nothing."""
    offered: dict[int, int] = {}
    while not group.closed:
        group.check()
        outer.apply()
        waits = fetches = not group.catch_up(timeout_s=0.0)
        for index, fragment in enumerate(outer.fragments):
            # The newer state arrives before the group reports that nothing is outstanding.
            if group.outstanding(index) or fragment.state is not fragment.applied:
                waits = True
            elif not fetches and offered.get(index) != (version := fragment.state.meta.version):
                offered[index] = version
                waits |= outer.propose_pending(index, lr=largest_lr())
        # Not group.wait(), which has no deadline.
        if not waits or clock() >= deadline:
            return
        time.sleep(_POLL_S)


def warn_waits(outer: OuterStep, group: ReplicaGroup, wait_s: float) -> None:
    """Logs that a replica that is done waits ``wait_s`` at most for a job that cannot take its steps."""
    pending = max(outer.pending_by_fragment(), default=0)
    if pending and wait_s >= 1.0 and (why := group.obstacle()):
        text = "replica %s is done, with %s pending: %s; it waits %.0f s at most"
        _log.warning(text, group.replica, count(pending, "inner step"), why, wait_s)


def warn_left(outer: OuterStep, replica: str, reason: str, *, apart: bool) -> None:
    """Logs steps that are in no outer step, whether or not this replica had time to hand them in; ``reason``: see
    `Raised.why_at_once`. ``apart``: see `Leaver.is_apart`."""
    left = [fragment.pending_steps for fragment in outer.fragments if not fragment.by_job]
    if any(left):
        where = f" (by fragment: {', '.join(map(str, left))})" if len(left) > 1 else ""
        undecided = any(outer.shared.group.outstanding(fragment.index) for fragment in outer.fragments)
        unless = ", unless the round that it was in still counts them" if undecided else ""
        text = "replica %s has left with %s that no committed state contains%s%s: %s%s"
        why = reason or "it is done, and they came too late for its last outer step"
        kept = ""
        if apart:
            meta = outer.fragments[0].state.meta
            kept = "; its own parameters stay in its model, and export() writes those of version "
            kept += f"{meta.version}, inner step {meta.inner_step}"
        _log.warning(text, replica, count(max(left), "inner step"), where, unless, why, kept)


def not_stepped(outer: OuterStep) -> bool:
    """Whether the loop has trained with the inner optimizer directly, whose steps the job does not know. All ranks call
    it."""
    if outer.counters.local_steps or outer.gradients is not None:
        return False
    fragments = [f for f in outer.fragments if not f.by_job]
    return not all(all(f.view.together(torch.equal(f.view.read(f.view.empty()), f.start))) for f in fragments)


def warn_not_stepped(replica: str) -> None:
    """See `not_stepped`."""
    text = (
        "replica %s has changed its parameters without one step() of the wrapped optimizer: the job has nothing of "
        "it; call step() of what ftopt.wrap() returns, in place of the inner optimizer's"
    )
    _log.warning(text, replica)


def warn_how_to_resume(outer: OuterStep, replica: str, unsaved: str) -> None:
    """Logs the position of a replica that a signal has ended, and how to restart it if its own command started it, not
    a notebook, torchrun, `multiprocessing` or ``ftopt launch``. ``unsaved``: instead, why it cannot go on."""
    meta, steps = outer.fragments[0].state.meta, outer.counters.local_steps
    pending = max(outer.pending_by_fragment(), default=0)
    others = "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process() is not None or by_environment()
    others = others or hasattr(sys, "ps1") or "ipykernel" in sys.modules
    again = f"; {unsaved}" if unsaved else "" if others else f"; to go on: {_command(replica)}"
    taken = count(steps, "inner step")
    verb = "is" if pending == 1 else "are"
    where = f"of its {taken} {pending} {verb} in no version" if pending else f"none of its {taken} is pending"
    _log.warning(
        "replica %s has left at version %d, inner step %d: %s%s", replica, meta.version, meta.inner_step, where, again
    )


def _command(replica: str) -> str:
    """The command that started this process, for a shell that has its token, if any."""
    names = [f"FTOPT_{name}" for name in _CONNECTED_BY]
    if os.environ.get("FTOPT_REPLICA") == replica:
        names.append("FTOPT_REPLICA")
    named = [f"{name}={shlex.quote(value)}" for name in names if (value := os.environ.get(name))]
    return " ".join([*named, shlex.join(sys.orig_argv)])
