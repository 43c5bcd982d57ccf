"""Which machine is there when, and what is done to its process: one schedule for the simulation and for real jobs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulate.traces import ADD, REMOVE, Change, Trace

START, WARN, KILL = "start", "warn", "kill"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A job and its failures; all times in seconds.

    Args:
        machines: with one replica each.
        seconds: how long.
        step_s: an inner step's wait.
        sync_every: inner steps of a round.
        delay: of the way with delay.
        gap_s: between two removals, on average.
        back_s: from a removal to a machine of the same name.
        start_s: from when a machine is there to when its process is started.
        told: share of the removals that come with a notice: SIGTERM ``notice_s`` before.
        notice_s: as said.
        dead_after_s, grace_s: as in ``policy``.
        checkpoint_s: what a checkpoint takes, of training that restarts.
    """

    machines: int = 6
    seconds: float = 150.0
    step_s: float = 0.1
    sync_every: int = 20
    delay: int = 5
    gap_s: float = 5.0
    back_s: float = 3.0
    start_s: float = 1.5
    told: float = 0.4
    notice_s: float = 1.0
    dead_after_s: float = 1.0
    grace_s: float = 0.5
    checkpoint_s: float = 0.1


def schedule(setting: Setting, seed: int) -> Trace:
    """Machines that are removed one at a time, at random, and come back under their names.

    None is removed in the first round, nor while only half of them are there: a job all of whose machines went would
    begin anew without a checkpoint, which is another question.
    """
    draw = random.Random(seed)
    names = [f"r{i}" for i in range(setting.machines)]
    changes = list(quiet(setting).changes)
    here, back = list(names), list[tuple[float, str]]()
    quiet_s = 2 * setting.start_s + setting.step_s * setting.sync_every
    at_s = quiet_s + draw.expovariate(1 / setting.gap_s)
    while min([at_s, *(due_s for due_s, _ in back[:1])]) < setting.seconds:
        if back and back[0][0] <= at_s:
            due_s, name = back.pop(0)
            here.append(name)
            changes.append(Change(due_s, ADD, name))
            continue
        if len(here) > setting.machines // 2:
            name = here.pop(draw.randrange(len(here)))
            changes.append(Change(at_s, REMOVE, name, told=draw.random() < setting.told))
            back.append((at_s + setting.back_s, name))
        at_s += draw.expovariate(1 / setting.gap_s)
    return Trace(f"seed {seed}", tuple(changes), setting.seconds)


def quiet(setting: Setting) -> Trace:
    """All machines, and no failures."""
    changes = tuple(Change(0.0, ADD, f"r{i}") for i in range(setting.machines))
    return Trace("no failures", changes, setting.seconds)


@dataclass(frozen=True, order=True)
class Deed:
    """What is done to a machine's process: ``start``, ``warn`` (SIGTERM) or ``kill`` (SIGKILL)."""

    at_s: float
    what: str
    node: str


def deeds(trace: Trace, *, start_s: float, notice_s: float) -> list[Deed]:
    """In order of time. A machine that is gone before its process would start has none."""
    return sorted(_deeds(trace, start_s, notice_s))


def _deeds(trace: Trace, start_s: float, notice_s: float) -> Iterator[Deed]:
    for stay in trace.stays():
        begins_s = stay.start_s + start_s
        if begins_s >= stay.stop_s:
            continue
        yield Deed(begins_s, START, stay.node)
        if stay.removed:
            yield Deed(stay.stop_s, KILL, stay.node)
            if stay.told and stay.stop_s - notice_s > begins_s:
                yield Deed(stay.stop_s - notice_s, WARN, stay.node)


def present(trace: Trace, at_s: float, start_s: float = 0.0) -> int:
    """How many machines are there, and their processes have started."""
    return sum(stay.start_s + start_s <= at_s < stay.stop_s for stay in trace.stays())
