"""Other systems on the same trace, as small models: which work survives a failure, and how long all stand still.

These are models, not measurements: each states its assumptions. All machines are equal, with `Model.step_s` per step.
``E`` is the share of time in which synchronous replicas compute while they also exchange gradients (the backward pass,
two thirds of a step, hides the exchange)::

    E = step / max(step, step / 3 + reduce(n))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulate.assumptions import Model
from benchmarks.simulate.tally import Outcome
from benchmarks.simulate.traces import ADD, REMOVE, Change, Trace

HEARTBEAT_S = 5.0
"""torchft's default time-out."""

TIMEOUT_S = 3.0
"""The default time-out of synchronous training with ftopt (``policy.dead_after_s``)."""


def young_daly(checkpoint_s: float, mtbf_s: float) -> float:
    """The interval between two checkpoints that loses the least work: sqrt(2 C M). Source: Young 1974, Daly 2006."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def mean_gap_s(trace: Trace) -> float:
    """Mean time between two moments at which machines are removed; inf without any."""
    moments = len(trace.removals())
    return trace.end_s / moments if moments else math.inf


def efficiency(model: Model, machines: int) -> float:
    """E of synchronous steps on ``machines`` machines."""
    return model.step_s / max(model.step_s, model.step_s / 3 + model.reduce_s(machines))


@dataclass(frozen=True, kw_only=True)
class Discard:
    """Rounds of ``sync_every`` steps; a failed one loses the phase of all survivors, and a joiner's first one is lost.

    ``any_failure``: any removal during the phase fails the round, the bound for a layer that throws rounds away. Else
    only a removal after the quorum request does, or one so shortly before that the dead machine still counts.
    ``timeout_s``: time-out for a silent replica.
    """

    any_failure: bool
    timeout_s: float = HEARTBEAT_S

    @property
    def name(self) -> str:
        return "discard, any failure" if self.any_failure else "discard, torchft's DiLoCo"

    @property
    def assumes(self) -> str:
        when = (
            "a removal at any time of a round"
            if self.any_failure
            else f"a removal in the sync, or {self.timeout_s:g} s before it,"
        )
        return (
            f"{when} fails the round: all survivors lose its H steps and stand still for the time-out of "
            f"{self.timeout_s:g} s; a joiner's steps up to the next sync are lost"
        )

    def run(self, trace: Trace, model: Model) -> Outcome:
        stays = trace.stays()
        round_s = model.sync_every * model.step_s
        free = round_s / (round_s + model.reduce_s(_usual(trace)))
        now, done, lost, thrown, stood_s = model.start_s, 0.0, 0.0, 0.0, 0.0
        line, rounds, failed = [(0.0, 0.0)], 0, 0
        while now < trace.end_s:
            members = [x for x in stays if x.start_s + model.start_s <= now < x.stop_s]
            if not members:
                now = min((x.start_s + model.start_s for x in stays if x.start_s + model.start_s > now), default=1e18)
                continue
            steps = min(model.sync_every, int((trace.end_s - now) / model.step_s))
            sync_s = now + steps * model.step_s
            end_s = sync_s + model.reduce_s(len(members))
            there = [x for x in members if x.stop_s >= sync_s]
            begins_s = now if self.any_failure else sync_s - self.timeout_s
            fails = any(x.removed and begins_s < x.stop_s <= end_s for x in members)
            rounds, failed = rounds + 1, failed + fails
            died = sum(int((x.stop_s - now) / model.step_s) for x in members if x.stop_s < sync_s)
            joined = (x for x in stays if now < x.start_s + model.start_s < min(sync_s, x.stop_s))
            early = sum(int((min(sync_s, x.stop_s) - x.start_s - model.start_s) / model.step_s) for x in joined)
            won, discarded = (0, steps * len(there)) if fails else (steps * len(there), 0)
            done, lost, thrown = done + won, lost + died, thrown + discarded + early
            now = end_s + (self.timeout_s if fails else 0.0)
            stood_s += len(there) * (now - sync_s)
            line.append((now, done * model.batch))
            if steps == 0:
                break
        return _outcome(trace, model, done, lost, thrown, stood_s, line, rounds=rounds, aborted=failed, fault_free=free)


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """All machines take each step together; a removal makes them stand still, and may set them back.

    Args:
        name, assumes: its name, and its assumptions.
        pause_s: how long all stand still after machines were removed.
        join_s: the same after some were added; None: these wait for the next pause, or for the next checkpoint if they
            are worth it.
        checkpoint_s: duration of a checkpoint; None: a removal costs nobody more than the step under way.
        interval_s: time between two checkpoints; None: Young/Daly.
        on_notice: whether a notice triggers a checkpoint in time.
        keeps: whether only the removed machines' part of the step under way is lost.
        cost: factor by which redundancy lengthens a step.
    """

    name: str
    assumes: str
    pause_s: float
    join_s: float | None = None
    checkpoint_s: float | None = None
    interval_s: float | None = None
    on_notice: bool = False
    keeps: bool = False
    cost: float = 1.0

    def run(self, trace: Trace, model: Model) -> Outcome:
        return _Run(self, trace, model).outcome()


class _Run:
    """A synchronous policy on a trace."""

    def __init__(self, policy: Synchronous, trace: Trace, model: Model) -> None:
        self._p, self._trace, self._model = policy, trace, model
        self._gap_s = mean_gap_s(trace)
        saves_s = policy.checkpoint_s or 0.0
        every_s = max(model.step_s, young_daly(saves_s, self._gap_s)) if saves_s else math.inf
        self._every_s = policy.interval_s or every_s
        self._active: set[str] = set()
        self._waiting: set[str] = set()
        self._done = self._saved = self._lost = self._thrown = self._stood_s = 0.0
        self._pause_s = self._since_s = 0.0
        self._line = [(0.0, 0.0)]
        now = 0.0
        for at_s, changes in _grouped(trace, model.start_s):
            self._work(now, at_s - now)
            self._change(changes)
            now = at_s
        self._work(now, trace.end_s - now)

    def _rate(self) -> float:
        """Steps per second of all machines."""
        count = len(self._active)
        return count * efficiency(self._model, count) / (self._p.cost * self._model.step_s) if count else 0.0

    def _work(self, at_s: float, left_s: float) -> None:
        while left_s > 1e-9:
            count = len(self._active)
            if self._pause_s > 0 or not count:
                for_s = min(self._pause_s, left_s) if count else left_s
                self._pause_s = max(0.0, self._pause_s - for_s)
                self._stood_s += count * for_s
            else:
                for_s = min(self._every_s - self._since_s, left_s)
                self._done += for_s * self._rate()
                self._since_s += for_s
                if self._since_s >= self._every_s - 1e-6:
                    self._save()
            at_s, left_s = at_s + for_s, left_s - for_s
            self._line.append((at_s, self._done * self._model.batch))

    def _save(self) -> None:
        self._saved, self._since_s = self._done, 0.0
        self._pause_s += self._p.checkpoint_s or 0.0
        if self._waiting and len(self._waiting) / len(self._active) * self._gap_s > self._p.pause_s:
            self._restart()

    def _restart(self) -> None:
        self._pause_s = max(self._pause_s, self._p.pause_s)
        self._active |= self._waiting
        self._waiting.clear()

    def _change(self, changes: list[Change]) -> None:
        added = {x.node for x in changes if x.kind == ADD}
        removed = {x.node for x in changes if x.kind == REMOVE}
        struck = removed & self._active
        if struck:
            self._strike(struck)
        self._waiting -= removed
        self._active -= removed
        self._waiting |= added
        if struck or not self._active:
            if not struck and self._waiting:
                self._active, self._waiting = set(self._waiting), set()
            elif struck:
                self._restart()
        elif added and self._p.join_s is not None:
            self._pause_s = max(self._pause_s, self._p.join_s)
            self._active |= self._waiting
            self._waiting.clear()

    def _strike(self, struck: set[str]) -> None:
        """Removes the work that is lost with the machines ``struck``."""
        if self._p.checkpoint_s is not None and not (self._p.on_notice and self._model.notice_s > self._p.checkpoint_s):
            lost = self._done - self._saved
            self._since_s = 0.0
        elif self._p.checkpoint_s is not None:
            lost, self._saved, self._since_s = 0.0, self._done, 0.0
        else:
            lost = 0.5 * (len(struck) if self._p.keeps else len(self._active))  # half a step of each, on average
            lost = min(lost, self._done)
        self._done -= lost
        share = 1.0 if self._p.keeps and self._p.checkpoint_s is None else len(struck) / len(self._active)
        self._lost += share * lost
        self._thrown += (1 - share) * lost

    def outcome(self) -> Outcome:
        free = efficiency(self._model, _usual(self._trace)) / self._p.cost
        counts = (self._done, self._lost, self._thrown, self._stood_s)
        return _outcome(self._trace, self._model, *counts, self._line, fault_free=free)


def _grouped(trace: Trace, start_s: float) -> Iterator[tuple[float, list[Change]]]:
    """Changes grouped by time; a machine counts from when its process has started."""
    late: list[Change] = []
    for stay in trace.stays():
        if stay.start_s + start_s < stay.stop_s:
            late.append(Change(stay.start_s + start_s, ADD, f"{stay.node}@{stay.start_s:g}"))
            if stay.removed:
                late.append(Change(stay.stop_s, REMOVE, f"{stay.node}@{stay.start_s:g}"))
    late.sort(key=lambda x: (x.at_s, x.kind, x.node))
    moments: dict[float, list[Change]] = {}
    for change in late:
        moments.setdefault(change.at_s, []).append(change)
    yield from ((at_s, found) for at_s, found in moments.items() if at_s < trace.end_s)


def _usual(trace: Trace) -> int:
    """The number of machines, on average."""
    return max(1, round(trace.machine_seconds() / trace.end_s))


def _outcome(
    trace: Trace,
    model: Model,
    done: float,
    lost: float,
    thrown: float,
    stood_s: float,
    line: list[tuple[float, float]],
    *,
    rounds: int | None = None,
    aborted: int | None = None,
    fault_free: float,
) -> Outcome:
    """``lost``: steps of the removed machines; ``thrown``: steps of others."""
    machine_s = trace.machine_seconds()
    capacity = machine_s / model.step_s
    return Outcome(
        goodput=done / capacity if capacity else 0.0,
        samples=done * model.batch,
        capacity=capacity * model.batch,
        computed=(done + lost + thrown) * model.batch,
        twice=(lost + thrown) * model.batch,
        kept=done / (done + thrown) if done + thrown else 1.0,
        fault_free=fault_free,
        stall=stood_s / machine_s if machine_s else 0.0,
        rounds=rounds,
        aborted=aborted,
        line=line,
    )


def others(model: Model) -> list[Discard | Synchronous]:
    """The models of other systems."""
    saves_s = 12 * model.parameters / model.link_bytes_s  # parameters and Adam's moments in fp32
    starts_s = model.start_s + saves_s
    moves_s = 10 + saves_s
    return [
        Discard(any_failure=True),
        Discard(any_failure=False),
        Synchronous(
            name="checkpoint and restart",
            assumes=f"synchronous; a checkpoint of 12 bytes a parameter takes {saves_s:.1f} s, at the Young/Daly "
            f"interval; a removal stops all: {starts_s:.0f} s for start and load, and the work since the checkpoint; "
            "new machines come in with a restart, or at a checkpoint when they are worth one",
            pause_s=starts_s,
            checkpoint_s=saves_s,
        ),
        Synchronous(
            name="checkpoint and reshape (Varuna)",
            assumes=f"as above, and a notice longer than a checkpoint saves in time; a change of shape takes "
            f"{starts_s + 30:.0f} s (restart, and 30 s for the new shape)",
            pause_s=starts_s + 30,
            checkpoint_s=saves_s,
            on_notice=True,
        ),
        Synchronous(
            name="redundant computation (Bamboo)",
            assumes="synchronous; a neighbour repeats each forward pass (a third of a step); a removal costs 10 s and "
            "the step under way, two neighbours at once are taken to survive",
            pause_s=10.0,
            join_s=10.0,
            cost=4 / 3,
        ),
        Synchronous(
            name="re-planning (Oobleck)",
            assumes=f"synchronous; plans for every number of machines are ready; a change costs {moves_s:.0f} s (10 "
            "s and copying state), a removal also the step under way",
            pause_s=moves_s,
            join_s=moves_s,
        ),
        Synchronous(
            name="re-routing (ReCycle)",
            assumes="synchronous; peers take a dead machine's micro-batches: a removal costs 5 s and the step under "
            f"way; new machines come in for {moves_s:.0f} s",
            pause_s=5.0,
            join_s=moves_s,
        ),
        Synchronous(
            name="synchronous data-parallel",
            assumes=f"a removal costs the time-out of {TIMEOUT_S:g} s and the step of all; a joiner's fetch "
            f"is waited for ({saves_s:.1f} s)",
            pause_s=TIMEOUT_S,
            join_s=saves_s,
        ),
        Synchronous(
            name="synchronous, gradients reused",
            assumes="as above, but survivors keep their gradients: only the dead machine's samples are done again",
            pause_s=TIMEOUT_S,
            join_s=saves_s,
            keeps=True,
        ),
    ]
