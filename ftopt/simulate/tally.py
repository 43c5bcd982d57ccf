"""Many histories, one after the other, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ftopt.simulate.walk import History, run


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
