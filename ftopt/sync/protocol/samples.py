"""What a job's sample ledger counts: units of one batch, in one order through all epochs.

A *unit* is ``batch_size`` samples. Units are numbered 0, 1, 2, ... through all epochs, so an epoch is no barrier: unit
``n`` stands for ``positions(n)`` of the ``epoch_of(n)``-th permutation of the samples. The ledger does not know the
sample at a position: ``ftopt.data`` maps positions to samples, from ``seed`` and the epoch.

    per epoch = floor(samples / batch_size) with drop_last, ceil(samples / batch_size) without
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ftopt.errors import UserError
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.limits import MAX_BATCH, MAX_INT


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The settings of a ledger. They are part of what must agree among the replicas of a job.

    Args:
        samples: number of samples in the data set, at least 1.
        batch_size: samples per unit: those of one micro-batch of a replica.
        seed: of the order of the samples. Default 0.
        drop_last: whether to leave out an epoch's last samples if they do not fill a unit. Default False: an epoch's
            last unit may be short.
        epochs: number of epochs. Default None: without end.
        global_batch: samples of one step of all replicas together, a multiple of ``batch_size``, for a method that
            averages gradients; it stays constant as replicas come and go. Default None: replicas are granted units,
            and each takes steps of its own.

    Raises:
        UserError: a value is out of range; the message says which one, what is allowed and what to do.
    """

    samples: int
    batch_size: int
    seed: int = 0
    drop_last: bool = False
    epochs: int | None = None
    global_batch: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("samples", self.samples, 1),
            ("batch_size", self.batch_size, 1),
            ("seed", self.seed, 0),
        ):
            if not least <= value <= MAX_INT:
                raise UserError(f"{name}={value}; must be from {least} to {MAX_INT:,}")
        if self.epochs is not None and not 1 <= self.epochs <= MAX_INT // self.samples:
            raise UserError(f"epochs={self.epochs}; must be null (without end) or from 1 on")
        if self.drop_last and self.samples < self.batch_size:
            raise UserError(
                f"batch_size={self.batch_size} with {self.samples} samples and drop_last leaves no batch at all; "
                "use a smaller batch_size, or drop_last=false"
            )
        if self.global_batch is not None and (self.global_batch < 1 or self.global_batch % self.batch_size):
            raise UserError(
                f"global_batch={self.global_batch} with batch_size={self.batch_size}; must be a multiple of it, such "
                f"as {max(1, round(self.global_batch / self.batch_size)) * self.batch_size}"
            )
        if self.global_batch is not None and self.global_batch // self.batch_size > MAX_BATCH:
            raise UserError(
                f"global_batch={self.global_batch} with batch_size={self.batch_size} is more than {MAX_BATCH:,} "
                "micro-batches; use a larger batch_size"
            )

    @cached_property
    def units_per_epoch(self) -> int:
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    @cached_property
    def units(self) -> int | None:
        """Number of units of all epochs; None: without end."""
        return None if self.epochs is None else self.epochs * self.units_per_epoch

    def batch_from(self, start: int) -> Ranges:
        """BATCH: the units of the batch that begins with ``start``; fewer at the end of the data."""
        assert self.global_batch is not None
        stop = start + self.global_batch // self.batch_size
        if self.units is not None:
            stop = min(stop, self.units)
        return ((start, stop),) if start < stop else ()

    def epoch_of(self, unit: int) -> int:
        return unit // self.units_per_epoch

    def positions(self, unit: int) -> range:
        """The unit's positions in its epoch's order: ``batch_size`` of them, fewer in an epoch's last unit."""
        start = unit % self.units_per_epoch * self.batch_size
        return range(start, min(start + self.batch_size, self.samples))

    def count(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Number of samples in ranges ``(start, stop)`` of units."""
        return sum(self._before(stop) - self._before(start) for start, stop in ranges)

    def _before(self, unit: int) -> int:
        """Number of samples in the units before ``unit``."""
        epochs, rest = divmod(unit, self.units_per_epoch)
        per_epoch = min(self.samples, self.units_per_epoch * self.batch_size)
        return epochs * per_epoch + rest * self.batch_size
