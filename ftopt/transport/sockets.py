"""Finds the TCP connections of one Gloo group in this process, and ends them.

Gloo has no call that wakes a reduction whose peer hangs: it waits for its time-out, the group's destructor
with it. But its connections are ordinary sockets of this process, and a socket that is shut down fails at
once, on both sides. Every group listens on a port of its own, so the addresses that the members left in the
store tell which sockets are its.

Where the list of open files cannot be read (no ``/proc``), nothing is shut down, and a group lives on until
Gloo's own time-out.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path


def shut_down(addresses: Mapping[str, bytes]) -> int:
    """Ends this process' connections to or from any listener in ``addresses``; returns how many.

    Args:
        addresses: Gloo's store key (``../rank``) -> the member's address as Gloo wrote it.
    """
    ended = 0
    for connection in _connections():
        with connection:
            try:
                ends = (connection.getsockname(), connection.getpeername())
                if any(_holds(value, end) for end in ends for value in addresses.values()):
                    connection.shutdown(socket.SHUT_RDWR)
                    ended += 1
            except OSError:  # not connected, or not any more
                continue
    return ended


def _connections() -> Iterator[socket.socket]:
    """A duplicate of each internet socket of this process: what is looked at is surely what is shut down."""
    try:
        files = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return
    for file in files:
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            duplicate = os.dup(int(file.name))
        except OSError:  # closed meanwhile
            continue
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            yield connection
        else:
            connection.close()


def rank_of(message: str, addresses: Mapping[str, bytes], own: int) -> int | None:
    """The rank that an error ``message`` of Gloo's is about, if its address tells.

    The peer's port is its listener's or, if the peer connected to us, any; then the host must tell.
    """
    others = {int(key.rpartition("/")[2]): value for key, value in addresses.items()}
    others.pop(own, None)
    found = re.search(r"\[([0-9a-fA-F.:]+)\]:(\d+)", message)
    if found is None:
        return None
    host, port = found[1], int(found[2]) & 0xFFFF
    swapped = int.from_bytes(port.to_bytes(2, "little"), "big")  # Gloo forgets ntohs when it prints
    for tell in (port, swapped, None):
        try:
            ranks = [rank for rank, value in others.items() if _holds(value, (host, tell))]
        except OSError:  # no address
            return None
        if len(ranks) == 1:
            return ranks[0]
    return None


def _holds(value: bytes, address: tuple[str | int | None, ...]) -> bool:
    """Whether the ``sockaddr`` of ``address`` (host, port or None for any, ...) is in ``value``."""
    host, port = str(address[0]), address[1]
    version6 = ":" in host
    packed = socket.inet_pton(socket.AF_INET6 if version6 else socket.AF_INET, host.partition("%")[0])
    ports = b".." if port is None else re.escape(struct.pack(">H", int(port)))
    flow = b".{4}" if version6 else b""  # sockaddr_in6 has its flow label between port and address
    return re.search(ports + flow + re.escape(packed), value, re.DOTALL) is not None
