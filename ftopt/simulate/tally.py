"""Many histories, one after the other, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ftopt.simulate.walk import History, run

COVERED = (
    "abort",
    "return",
    "join",
    "leave",
    "gone",
    "fork",
    "rebirth",
    "rollback",
    "mismatch",
    "evicted",
    "void",
    "stalled",
    "held_open",
    "hurry",
    "a reducer that hangs for ever",
    "decided while a member was away",
    "decided with a dead member's work",
    "restart with journal",
    "restart without journal",
    "two coordinators at once",
    "a link that carries one way only",
    "a result that one member misses",
    *(f"{count} fragments" for count in (1, 2, 3, 4)),
    "adaptive grace",
    "a sample ledger",
    "a sample ledger, and an end of the data",
    "a sample ledger beside several fragments",
    "a leaver gives units back",
    "a global batch",
    "a share that grows",
    "a sum given up",
    "a share too late for its batch",
    "a global batch, and an end of the data",
    "all replicas die",
    "resumed with as many replicas",
    "resumed with more replicas",
    "resumed with a contribution under way",
    "resumed where later versions are void",
    "pending work of a missing replica",
    "a checkpoint is restored",
    "a copy is kept",
    "a dead one's steps are done again",
    "pending work of a dead one is taken over",
    "epoch_done",
    "no units for now",
    "data_ended",
    "halt",
)
"""What has to happen in more than one history of a hundred; else the walks prove little."""


@dataclass
class Coverage:
    """``covered``: in how many histories each thing has happened. ``failed``: the first history that broke a rule."""

    histories: int = 0
    events: int = 0
    covered: Counter[str] = field(default_factory=Counter)
    failed: History | None = None

    def walk(self, seed: int, count: int) -> Iterator[int]:
        """Runs the histories of ``seed``, ``seed + 1``, ...; ends at the first failure. Yields how many are done."""
        for number in range(seed, seed + count):
            history = run(number)
            self.histories += 1
            self.events += history.events
            self.covered.update(name for name, times in history.coverage.items() if times)
            if history.failure is not None:
                self.failed = history
                return
            yield self.histories

    def table(self) -> list[str]:
        """Share of the histories in which each thing has happened, a line each."""
        shares = sorted(self.covered.items(), key=lambda x: (-x[1], x[0]))
        return [f"  {name:<36} {count / max(1, self.histories):7.1%}" for name, count in shares]

    def rare(self) -> dict[str, int]:
        """Of `COVERED`, what happened in no more than 1 % of the histories."""
        return {name: self.covered[name] for name in COVERED if self.covered[name] <= 0.01 * self.histories}
