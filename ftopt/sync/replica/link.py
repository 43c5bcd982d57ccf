"""The connection to the coordinator, as the client sees it: `ftopt.sync.replica.websocket`, `ftopt.sync.local`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Channel(Protocol):
    """An open connection. All calls on the network thread."""

    def send(self, text: str, sent: Callable[[], None] | None = None) -> None:
        """Sends in order, without waiting; ``sent`` is called once it has gone out."""

    async def closed(self) -> None:
        """Returns when the connection has ended. Raises what is neither its end nor its loss: an error of ours."""

    async def close(self) -> None:
        """Ends it, after what was sent."""


class Link(Protocol):
    """Opens connections to the coordinator."""

    async def open(self, receive: Callable[[str], None]) -> Channel:
        """A new connection; ``receive`` is called with each message's text.

        Raises:
            OSError: no answer.
            Refused: the other side will never let this replica in (a wrong token, no coordinator).
        """

    async def end(self) -> None:
        """No further connection will be opened."""
