"""Micro-batches of a global batch that the replicas of a job share out among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from ftopt.data.batches import Batches
from ftopt.errors import UserError
from ftopt.sync.protocol.samples import Samples


class ShareSource(Protocol):
    """This replica's share of one global batch after the other: `ftopt.sync.replica.global_batch.GlobalBatch`."""

    def more(self) -> bool:
        """Waits for the next batch; False when the data have ended."""

    def next(self) -> int | None:
        """The next unit; None when the batch is whole. Blocks when the share is done and others are at work."""


class FromShares:
    """Where a `DataLoader` with a ``global_batch`` has its batches from.

    Args:
        batches: unit -> batch.
        samples: the job's.
        share: this replica's share.
    """

    def __init__(self, batches: Batches, samples: Samples, share: ShareSource) -> None:
        self._batches = batches
        self._samples = samples
        self._share = share
        self.epoch = 0

    def check(self) -> None:
        raise UserError(
            "the loader has a global batch, and is iterated over without it; use `for micro_batches in "
            "loader.global_batches()`, with a loop over each of them inside"
        )

    def batches(self) -> Iterator[Any]:
        """The micro-batches of the next global batch."""
        while (unit := self._share.next()) is not None:
            self.epoch = self._samples.epoch_of(unit)
            yield self._batches[unit]

    def global_batches(self) -> Iterator[Iterator[Any]]:
        while self._share.more():
            yield self.batches()

    def state_dict(self) -> dict[str, Any]:
        return {"shares": asdict(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        now, was = asdict(self._samples), state["shares"]
        if wrong := [f"{name}={now[name]!r}, was {was[name]!r}" for name in now if now[name] != was[name]]:
            raise UserError(f"{'; '.join(wrong)}: the state is of other data or another order; give them as they were")
