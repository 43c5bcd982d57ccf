"""The connection to the coordinator, as the client sees it: `ftopt.sync.replica.websocket`, `ftopt.sync.local`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Channel(Protocol):
    """An open connection. All calls on the network thread."""

    def send(self, text: str, sent: Callable[[], None] | None = None) -> None:
        """Sends in order, without waiting; ``sent`` is called once the text has gone out."""

    async def closed(self) -> None:
        """Returns when the connection has ended or was lost. Any error that it raises is a bug of ours."""

    async def close(self) -> None:
        """Ends the connection, after all messages sent before."""


class Link(Protocol):
    """Opens connections to the coordinator."""

    async def open(self, receive: Callable[[str], None]) -> Channel:
        """Opens a connection; ``receive`` is called with each message's text.

        Raises:
            OSError: nobody answers.
            Refused: the other side will never let this replica in (a wrong token, no coordinator).
        """

    async def end(self) -> None:
        """Cleans up; no further connection will be opened."""
