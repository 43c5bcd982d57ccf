"""A coordinator that takes the place of the job's: ``python other.py HOW TAKEN ARGUMENTS``.

``protocol``: it speaks another version of the protocol, as after an upgrade. ``job``: a newcomer with other settings
comes first, and defines the job of that name. It is ``ftopt coordinator`` with these arguments; ``TAKEN`` is a file
that it makes when the place is taken.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from ftopt.cli.main import main as ftopt
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.replica.link import Channel
from ftopt.sync.replica.websocket import WebSocketLink

_BETWEEN_S = 0.02
_SYNC = FaultPolicy(start_replicas=1, dead_after_s=60.0)


class Stranger:
    """A newcomer of the job's name with another model: it starts the job, and does nothing more."""

    def __init__(self, url: str, taken: Path) -> None:
        self._url, self._taken = url, taken
        self._machine = Replica(Identity("default", "stranger", {"model": "another"}, asdict(_SYNC), initial="0"))
        self._channel: Channel | None = None

    async def come(self) -> None:
        """Connects as soon as somebody listens, and stays."""
        link = WebSocketLink(self._url, token=None, dead_after_s=_SYNC.dead_after_s)
        while self._channel is None:
            try:
                self._channel = await link.open(self._receive)
            except OSError:
                await asyncio.sleep(_BETWEEN_S)
        self._run(self._machine.connect())
        await asyncio.Event().wait()

    def _receive(self, text: str) -> None:
        message = m.decode(text)
        assert isinstance(message, m.FromCoordinator)
        self._run(self._machine.receive(message))

    def _run(self, effects: list[e.ReplicaEffect]) -> None:
        assert self._channel is not None
        for effect in effects:
            if isinstance(effect, e.Send):
                self._channel.send(m.encode(effect.message))
            elif isinstance(effect, e.Begin):
                self._taken.touch()


def main(how: str, taken: Path, arguments: list[str]) -> int:
    """Serves until it is killed."""
    if how == "protocol":
        m.PROTOCOL += 1
        taken.touch()
    else:
        url = f"http://{arguments[arguments.index('--bind') + 1]}"
        threading.Thread(target=lambda: asyncio.run(Stranger(url, taken).come()), daemon=True).start()
    return ftopt(["coordinator", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
