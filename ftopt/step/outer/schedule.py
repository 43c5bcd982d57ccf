"""Decides whether fragments are due, and provides the triggers' input. Training thread, between two inner steps.

A method whose answer depends on inner steps alone has a fixed period, and `Fragment.ask_from` is the first step at
which it is asked; all other methods are asked at every step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ftopt.methods.triggers import Due, MeanMeasurements, Measurements, Progress
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.shared import Shared
from ftopt.sync.group import Reading


class SyncSchedule:
    """When each fragment of a replica is due."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._group = shared, shared.group

    def due(self, fragment: Fragment) -> Due:
        """Asks the method. Its trigger's numbers are measured only while nothing is outstanding, since they would
        otherwise include proposed work."""
        if self._shared.counters.local_steps < fragment.ask_from:
            return Due.NO
        progress = self.progress(fragment)
        if (view := fragment.view).shared and fragment.timing.fixed_period is None:  # rank 0's values, such as seconds
            progress = view.together(progress)[0]
        wanted = fragment.timing.needs(progress)
        if wanted and not self._group.outstanding(fragment.index):
            with torch.no_grad():
                own = fragment.trigger_metrics.look(wanted, fragment.start, self._shared.memory.like(fragment.start))
            own = view.together(own)[0]
            progress = replace(progress, own=own, means=self._share(fragment, own))
        return fragment.timing.due(progress)

    def progress(self, fragment: Fragment) -> Progress:
        """The triggers' input."""
        return Progress(
            fragment=fragment.index,
            steps=self._steps(fragment) - fragment.trigger_from_step,
            pending_steps=fragment.pending_steps,
            local_steps=self._shared.counters.local_steps,
            inner_step=self._shared.inner_step(),
            seconds=self._shared.clock() - fragment.trigger_from_s,
            agreed=fragment.trigger_metrics.agreed(fragment.applied.outer),
            pace=fragment.pace or self._shared.counters.totals.pace(fragment.base.totals),
            rate=self._shared.counters.totals.mean_rate(fragment.base.totals),
        )

    def restart(self, fragment: Fragment, *, anew: bool, behind: int = 0) -> None:
        """Restarts the triggers' counts ``behind`` steps ago. ``anew``: the phase follows the job's inner step, not a
        proposal of this replica."""
        step = self._steps(fragment) - behind
        if anew:
            count = len(self._shared.fragments)
            inner_step = self._shared.job_step() if fragment.by_job else self._shared.inner_step()
            step -= fragment.timing.phase(fragment.index, count, inner_step)
        fragment.restart_trigger(step, self._shared.clock())

    def tau(self, fragment: Fragment) -> int:
        """Inner steps from a snapshot to applying its result; 0 while replicas still average after every step."""
        return 0 if self.averages(fragment) else fragment.overlap.delay

    def averages(self, fragment: Fragment) -> bool:
        """Whether replicas still average their parameters after every step (``average_until_step``)."""
        until = fragment.method.average_until_step
        return until > 0 and self._shared.inner_step() <= until

    def _steps(self, fragment: Fragment) -> int:
        """The steps that triggers count: this replica's inner steps. With gradients, which keep replicas in step, the
        job's: a replica waiting for an average before the others are due would hold up their gradients."""
        return self._shared.job_step() if fragment.by_job else self._shared.counters.local_steps

    def _share(self, fragment: Fragment, own: Measurements) -> MeanMeasurements | None:
        """Sends this replica's reading to the others, if the trigger uses theirs; returns the means."""
        if own.square is None or not fragment.timing.shares:
            return None
        version = fragment.applied.meta.version
        values = (own.square,) if own.along is None else (own.square, own.along)
        self._group.share(Reading(fragment.index, version, values))
        means = fragment.view.together(self._group.means(fragment.index))[0]
        if means is None or means.version != version or not means.values:
            return None
        return MeanMeasurements(means.count, Measurements(*means.values[:2]))
