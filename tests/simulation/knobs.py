"""The constants of one history."""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol.coordinator.roster.horizon import KEPT
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.samples import Samples

JOB = "job"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The constants of one history; seconds are virtual.

    ``fault``: chance of a fault at each protocol point. ``corrupt``: chance that a member's result has a flipped bit.
    ``samples``: of the sample ledger, None without one; ``accumulate``: units of an inner step; ``ahead``: units that
    the loader takes ahead. ``hasty``: chance that a trigger means now at a boundary; above 0, heartbeats bring
    readings, too. ``save_every``: versions from one checkpoint to the next, 0 without any.
    ``replay``: neighbours keep copies, from which a dead one's steps are done again; ``copy_every``: inner steps from
    one to the next, 0: one a round. ``spares``: that stand by. ``kept_gone``: gone incarnations that a
    coordinator remembers.
    """

    settings: dict[str, float | int | str | None]
    fragments: int = 1
    sync_every: int = 3
    delay_s: float = 0.02
    reduce_s: float = 0.1
    fetch_s: float = 0.3
    fault: float = 0.0
    corrupt: float = 0.0
    nonfinite: float = 0.0
    outliers: float = 0.0
    hasty: float = 0.0
    overlap_steps: int = 0
    grace: float = 0.0
    samples: Samples | None = None
    save_every: int = 0
    accumulate: int = 1
    ahead: int = 0
    replay: bool = False
    copy_every: int = 0
    spares: int = 0
    kept_gone: int = KEPT

    def identity(self, replica: str, initial: str, address: str) -> Identity:
        """What a process of this job says of itself."""
        return Identity(
            job=JOB,
            replica=replica,
            lines={"model": "m"},
            settings=self.settings,
            initial=initial,
            fragments=self.fragments,
            address=address,
            samples=self.samples,
        )

    @property
    def global_batch(self) -> int:
        """Units of the global batch that replicas share out; 0: each takes steps of its own."""
        samples = self.samples
        return 0 if samples is None or samples.global_batch is None else samples.global_batch // samples.batch_size

    @property
    def at_once(self) -> int:
        """Units of a global batch that a replica computes at once, as one micro-batch."""
        return 1 if self.samples is None else 1 + self.samples.samples % 2

    @property
    def strict(self) -> bool:
        """Whether a loss ends the job for all (LOSS)."""
        return self.settings.get("on_loss") == "fail"

    @property
    def dead_after_s(self) -> float:
        return float(self.settings["dead_after_s"] or 0)

    @property
    def recovery_s(self) -> float:
        return float(self.settings["recovery_s"] or 0)
