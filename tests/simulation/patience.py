"""I4: how long a training thread stands still, and for how long it may (the table in ``docs/operations.md``)."""

from __future__ import annotations

from tests.simulation.reduction import WORD_S
from tests.simulation.world import Process, Violation

_IN_TURN = 4
"""Messages of a round that wait for each other: `Propose`, `Quorum`, `Prepared`, and what ends the wait. Each may take
ten times as long as usual."""


class Patience:
    """Watches one life of a process. It looks at each heartbeat: a wait that never ends is seen, too."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world
        self._since: tuple[float, int] | None = None
        """When the wait began, and how many incidents there had been."""

    def look(self, *, waits: bool) -> None:
        """``waits``: whether the training thread waits for the fate of a contribution."""
        if not waits:
            self._since = None
            return
        world = self._world
        _, before = self._since = self._since or (world.now, world.incidents)
        still_s = self.still_s()
        incidents = world.incidents - before + world.jams  # who comes late again has twice as long
        if still_s > self._limit_s() * (1 + incidents):
            text = f"{self._process.name} stands still for {still_s:.1f} s, with {incidents} incidents meanwhile"
            raise Violation("I4", text)

    def still_s(self) -> float:
        """How long it has waited for others."""
        if self._since is None:
            return 0.0
        own_s = max(self._process.frozen_until_s, self._process.jammed_until_s)  # it waits for itself
        return self._world.now - max(self._since[0], own_s)

    def _limit_s(self) -> float:
        """What one incident may cost: the others come late, then one of them is silent in the reduction, or has what
        is to be fetched. Where a link was cut and works again when a member's time is over, that one finds nobody to
        name, and complains `WORD_S` later, as the real transport does."""
        world, knobs = self._world, self._world.knobs
        load_s = max(p.longest_step_s for p in world.processes.values()) * max(1, knobs.global_batch)
        called_in_s = max(0.5, 2 * load_s)
        network_s = 2 * knobs.reduce_s + WORD_S + _IN_TURN * 10 * knobs.delay_s
        return float(knobs.settings["grace_s"] or 0) + called_in_s + knobs.dead_after_s + network_s
