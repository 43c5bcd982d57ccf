"""Micro-batches of a global batch that the replicas of a job share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from ftopt.data.batches import Batches
from ftopt.data.states import OTHER_DATA, check_same
from ftopt.errors import UserError
from ftopt.sync.protocol.samples import Samples


class ShareSource(Protocol):
    """This replica's share of each global batch in turn: `ftopt.sync.replica.global_batch.GlobalBatch`."""

    def more(self) -> bool:
        """Waits for the next global batch; False: the data have ended."""

    def next(self) -> int | None:
        """The next unit; None: the global batch is complete. Blocks while only other replicas have units left."""


class FromShares:
    """Where a `DataLoader` with a ``global_batch`` gets its batches."""

    def __init__(self, batches: Batches, samples: Samples, share: ShareSource) -> None:
        self._batches = batches
        self._samples = samples
        self._share = share
        self.epoch = 0

    def check(self) -> None:
        raise UserError(
            "the loader has a global batch, so it cannot be iterated over directly; use `for micro_batches in "
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
        check_same(asdict(self._samples), state["shares"], OTHER_DATA)
