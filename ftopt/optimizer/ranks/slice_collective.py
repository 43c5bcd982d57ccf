"""The collective of one rank's slice, as the outer step sees it, and the rendezvous store of ranks other than 0."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ftopt.codecs import Codec
from ftopt.sync.group import Carry, Collective, Owed, RankLinks, Summed

_MARGIN_S = 5.0


class SliceCollective:
    """A `Collective` that sends payloads over the slice's lanes; all ranks get rank 0's rows.

    Args:
        main: rank 0's collective with the other members; None on the other ranks.
        rank, size: the island's place among the members.
        lanes: of this slice.
    """

    def __init__(self, main: Collective | None, rank: int, size: int, lanes: Any, links: RankLinks) -> None:
        self._main, self.rank, self.size = main, rank, size
        self._lanes, self._links = lanes, links
        self._rows_of_all: list[list[int]] | None = None

    @property
    def sent_bytes(self) -> int:
        """Of this slice."""
        return int(self._lanes.sent_bytes)

    @property
    def received_bytes(self) -> int:
        """Of this slice."""
        return int(self._lanes.received_bytes)

    def all_reduce_(self, flat: Tensor, summed: Summed | None = None) -> None:
        self._lanes.all_reduce_(flat, summed)

    def mean_encoded_(
        self,
        flat: Tensor,
        codec: Codec,
        shares: Sequence[float],
        owed: Owed | None = None,
        carry: Carry | None = None,
        summed: Summed | None = None,
    ) -> Owed | None:
        found: Owed | None = self._lanes.mean_encoded_(flat, codec, shares, owed, carry, summed)
        return found

    def tell(self, row: Sequence[int]) -> None:
        """Does nothing: rank 0 has sent its row when the reduction began."""

    def told(self) -> list[list[int]]:
        if self._rows_of_all is None:
            self._rows_of_all = self._links.all(None if self._main is None else self._main.told())[0]
        return self._rows_of_all

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = self._links.all(None if self._main is None else self._main.exchange(row))[0]
        return found

    def stop(self) -> None:
        self._lanes.stop()

    def close(self) -> None:
        self._lanes.close()


class RelayedStore:
    """The coordinator's store for ranks other than 0, through rank 0's `StoreOps`."""

    def __init__(self, links: RankLinks) -> None:
        self._links, self._numbers = links, itertools.count()
        self._asked: dict[int, queue.SimpleQueue[Any]] = {}

    def set(self, key: str, value: bytes) -> None:
        self._links.send(0, ("set", key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        number, box = next(self._numbers), queue.SimpleQueue[Any]()
        self._asked[number] = box
        try:
            self._links.send(0, ("get", number, key, timeout_s))
            found = box.get(timeout=timeout_s + _MARGIN_S)
        except queue.Empty:
            raise TimeoutError(key) from None
        finally:
            self._asked.pop(number, None)
        if isinstance(found, BaseException):
            raise found
        return bytes(found)

    def answered(self, number: int, found: Any) -> None:
        """Handles rank 0's answer."""
        if (box := self._asked.get(number)) is not None:
            box.put(found)


def relay_get(links: RankLinks, ops: Any, rank: int, number: int, key: str, timeout_s: float) -> None:
    """Rank 0: looks a key up for another rank, on a thread of its own."""

    def look_up() -> None:
        found: Any
        try:
            found = ops.get(key, timeout_s)
        except BaseException as error:
            kind = type(error) if type(error) in (ConnectionError, TimeoutError, InterruptedError) else ConnectionError
            found = kind(str(error))
        try:
            links.send(rank, ("got", number, found))
        except Exception:  # the rank is gone, which the link has reported
            return

    threading.Thread(target=look_up, name="ftopt-relay", daemon=True).start()
