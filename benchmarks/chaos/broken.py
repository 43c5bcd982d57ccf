"""A replica that is broken for a while: its reductions fail each time, and its connection to the coordinator lives.

What is broken is its transport, in its own process, at the place where a host's network or memory would be: the address
that it leaves for its peers, the exchange itself, or the values that come of it. A file says in which way, and it works
again when the file is gone.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ftopt.transport.gloo import GlooCollective, GlooTransport
from ftopt.transport.store import RendezvousStore

VALUES = "broken values"
BROKEN = {
    "broken address": ("refused", "silent"),
    "broken reduction": ("fails", "mute"),
    "broken blame": ("blames",),
    VALUES: ("codec", "not finite", "huge"),
}
"""Kind of fault -> the ways in which a replica is broken.

- ``refused``, ``silent``: where its peers are to reach it nobody listens, or nobody answers;
- ``fails``: it loses its connections at once, and can name nobody; ``mute``: nothing moves while it is there;
- ``blames``: it has no port to listen on, and names a peer that is well;
- ``codec``: it cannot decode what it gets; ``not finite``, ``huge``: the mean is so, or far out of line, in its memory
  alone.
"""
QUIET = ("silent", "mute")
"""Ways that show only when time is up."""
_REFUSED_PORT = 1
_PORTS = range(10_000, 30_000)
"""Below those that a process gets without asking: of two that connect, the one with the higher port does it."""
_HUGE = 1e18
"""Out of line also for a replica without peers, whose limit is the square of ``outlier_ratio``, 1e12 in a campaign,
times what outer steps move."""


def file_of(folder: Path, name: str) -> Path:
    """Says how the life ``name`` is broken."""
    return folder / f"{name}.broken"


def install(folder: Path, name: str) -> None:
    """From now on this process' transport does what the file says."""
    path = file_of(folder, name)

    def how() -> str:
        try:
            return path.read_text()
        except FileNotFoundError:
            return ""

    _around(RendezvousStore, "set", lambda call, store, key, value: call(store, key, _elsewhere(how(), value)))
    _around(GlooTransport, "_device", lambda call, transport: call(transport) if how() != "blames" else _no_port())
    _around(GlooCollective, "tell", lambda call, group, row: call(group, row) if _moves(how(), group) else None)
    for reduction in ("mean_encoded_", "all_reduce_"):
        _around(GlooCollective, reduction, lambda call, *given, **more: _spoiled(how(), given[1], call(*given, **more)))


def _around(owner: type, name: str, ours: Callable[..., Any]) -> None:
    call = getattr(owner, name)
    setattr(owner, name, lambda *given, **more: ours(call, *given, **more))


def _elsewhere(how: str, address: bytes) -> bytes:
    """A member's address as Gloo writes it, or one with a port that does not lead to it."""
    if how not in ("refused", "silent"):
        return address
    port = _REFUSED_PORT if how == "refused" else _silent()[0].getsockname()[1]
    return re.sub(
        rb"\x02\x00..(?=\x7f\x00\x00\x01)", lambda _: b"\x02\x00" + port.to_bytes(2, "big"), address, flags=re.DOTALL
    )


@cache
def _silent() -> list[socket.socket]:
    """A listener that takes nobody, and the one that fills its queue."""
    for port in _PORTS:
        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.close()
            continue
        listener.listen(0)
        waiting = socket.socket()
        waiting.setblocking(False)
        waiting.connect_ex(("127.0.0.1", port))
        return [listener, waiting]
    raise OSError(f"no port of {_PORTS} is free")


def _no_port() -> None:
    raise RuntimeError("broken: no port is left")


def _moves(how: str, group: GlooCollective) -> bool:
    """Connections that stood before it was broken are lost with its address: a group lasts as long as its members."""
    if not how:
        group.stood = True  # type: ignore[attr-defined]
    if how == "fails" or (how in (*BROKEN["broken address"], "blames") and hasattr(group, "stood")):
        raise ConnectionResetError("broken: all connections are lost")
    if how == "mute" and group.size > 1:
        group.open()
        stopped = group._group._stopped
        stopped.wait(60.0)
        group._group.check()
        raise TimeoutError("broken: nothing moves")
    return True


def _spoiled(how: str, flat: Tensor, found: Any) -> Any:
    """What a reduction returns, after ``flat``, which it leaves the mean in, is spoiled."""
    if flat.is_floating_point() and how in ("not finite", "huge"):
        flat.detach().fill_(math.nan) if how == "not finite" else flat.detach().add_(_HUGE)
    if flat.is_floating_point() and how == "codec":
        raise FloatingPointError("broken: what was decoded is not finite")
    return found
