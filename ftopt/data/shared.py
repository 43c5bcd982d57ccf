"""Micro-batches of a global batch that the replicas of a job share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ftopt.data.batches import Batches
from ftopt.data.shares_ahead import SharesAhead, each_of
from ftopt.data.states import OTHER_DATA, check_same
from ftopt.data.workers import PoolSettings
from ftopt.errors import UserError
from ftopt.sync.group import GlobalBatch
from ftopt.sync.protocol.samples import Samples


class FromShares:
    """The source of the batches of a `DataLoader` with a ``global_batch``."""

    def __init__(self, batches: Batches, samples: Samples, share: GlobalBatch, pool: PoolSettings) -> None:
        self._batches = batches
        self._ahead = SharesAhead(batches, samples, share, pool) if pool.workers else None
        self._samples = samples
        self._share = share
        self.epoch = 0

    def refuse(self) -> None:
        raise UserError(
            "the loader has a global batch, so it cannot be iterated over directly; use `for micro_batches in "
            "loader.global_batches()`, with a loop over each of them inside"
        )

    @property
    def ended(self) -> bool:
        """Whether all epochs are in the job's model."""
        return self._share.ended

    def batches(self) -> Iterator[Any]:
        """The micro-batches of the next global batch."""
        share = self._share
        while (units := share.next()) is not None:
            try:
                ahead = self._ahead
                batch = self._batches.together(each_of(units)) if ahead is None else ahead.load(units)
            except BaseException:
                share.put_back()
                raise
            self.epoch = self._samples.epoch_of(units[0][0])
            yield batch

    def global_batches(self) -> Iterator[Iterator[Any]]:
        while self._share.more():
            yield self.batches()

    def state_dict(self) -> dict[str, Any]:
        return {"shares": asdict(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same(asdict(self._samples), state["shares"], OTHER_DATA)
