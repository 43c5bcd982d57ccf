"""The machine's effects with the values at their time: they wait for the journal, while the machine goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ftopt.events import Event
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e


class Ends(NamedTuple):
    """The job has ended with this decision: no replica is left."""

    last: e.Decided


def dated(effects: e.Effects, machine: Coordinator) -> list[e.CoordinatorEffect | Ends]:
    """Returns ``effects`` with the job's inner step in each event, and with the job's end."""
    last = machine.rounds[0].versions.last if machine.rounds else None
    found: list[e.CoordinatorEffect | Ends] = []
    for x in effects:
        if isinstance(x, e.Emit) and x.inner_step is None and last is not None:
            x = replace(x, inner_step=last.inner_step)
        found.append(x)
        rolls_back = isinstance(x, e.Emit) and x.event == "rollback" and not x.fragment and x.version
        if rolls_back and last is not None and not machine.roster.members:
            found.append(Ends(last))
    return found


def event_of(x: e.Emit) -> Event:
    """The event for subscribers."""
    return Event(x.event, x.replica, x.incarnation, x.fragment, x.version, x.attempt, x.inner_step, x.data)


def failure(failed: m.JobFailed) -> Event:
    """The event of a job that has failed (LOSS)."""
    data = {"reason": failed.why, "lost_step": failed.lost_step, "versions": list(failed.versions)}
    return Event("job_failed", failed.replica, failed.incarnation, inner_step=failed.inner_step, data=data)
