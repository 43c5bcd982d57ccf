"""How histories are drawn where a planted bug shows itself in few of the usual ones; see `tests.sync.planted.rules`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.simulation import doom, drawn, walk
from tests.simulation.knobs import Knobs
from tests.simulation.simulation import Simulation

Patch = pytest.MonkeyPatch


def without_slow_replicas(patch: Patch) -> None:
    """No replica is slow."""
    patch.setattr(walk, "_slow_ones", lambda *_: None)


def with_outliers(patch: Patch) -> None:
    """Every second contribution is out of line, until the faults stop."""
    quiet = walk._quiet

    def often(knobs: Knobs, _: random.Random) -> Knobs:
        return knobs if knobs.global_batch else replace(knobs, outliers=0.5)

    def calm(world: Simulation) -> None:
        object.__setattr__(world.knobs, "outliers", 0.0)
        quiet(world)

    patch.setattr(drawn, "_spoiled", often)
    patch.setattr(walk, "_quiet", calm)


def resumed_late(patch: Patch) -> None:
    """There is a ledger, all replicas die, and those that resume come to a coordinator without memory, half of them
    late."""
    _until(patch, "_lent", lambda knobs: knobs.samples is not None)
    patch.setattr(drawn, "_saved", lambda knobs, _: replace(knobs, save_every=1))
    patch.setattr(doom, "_memory", lambda _: "none")
    patch.setattr(doom, "_comes_s", lambda chooser: chooser.uniform(0.1, 3.0) * chooser.choice((1, 5)))


def resumed_near_the_end(patch: Patch) -> None:
    """There are data that end, and all replicas die."""
    _until(patch, "_lent", lambda knobs: knobs.samples is not None and knobs.samples.units is not None)
    patch.setattr(drawn, "_saved", lambda knobs, _: replace(knobs, save_every=1))


def hung_near_the_end(patch: Patch) -> None:
    """There are data that end, and when faults stop most reducers hang for ever, with the last units or without."""
    _until(patch, "_lent", lambda knobs: knobs.samples is not None and knobs.samples.units is not None)
    unjam = walk._unjam

    def few(world: Simulation) -> None:
        unjam(world)
        able = [x for x in world.processes.values() if walk._trains(x) and x.jammed_until_s != math.inf]
        for process in able[1:]:
            if world.knobs.settings["min_replicas"] == 1 and world.chance(0.7):
                process.jam(math.inf)

    patch.setattr(walk, "_unjam", few)


def with_global_batches(patch: Patch) -> None:
    """There is a global batch."""
    patch.setattr(drawn, "_lent", lambda knobs, _: knobs)
    _until(patch, "_shared", lambda knobs: bool(knobs.global_batch))


def _until(patch: Patch, name: str, wanted: Callable[[Knobs], bool]) -> None:
    """What one of the functions of `drawn` draws is drawn again until it is so."""
    draw = getattr(drawn, name)

    def again(knobs: Knobs, chooser: random.Random) -> Knobs:
        found: Knobs = draw(knobs, chooser)
        return found if wanted(found) else again(knobs, chooser)

    patch.setattr(drawn, name, again)
