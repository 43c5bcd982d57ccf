"""Finds the TCP connections of one Gloo group in this process: ends them, or counts those that are still open.

Gloo has no call that wakes a reduction whose peer hangs: the reduction, and the group's destructor, wait for Gloo's
time-out. But its connections are ordinary sockets of this process, and a socket that is shut down fails at once, on
both sides. Every group listens on a port of its own, so the members' addresses in the store identify its sockets.

Where the list of open files cannot be read (no ``/proc``), nothing is shut down or counted, and a group lives on
until Gloo's own time-out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import socket
import struct
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EINVAL)
"""Errors of `connect` when a host cannot be reached (EINVAL: a route that drops)."""

_ESTABLISHED = 1
"""Linux' ``TCP_ESTABLISHED``, the first field of ``struct tcp_info``."""


def shut_down(addresses: Mapping[str, bytes]) -> int:
    """Ends this process' connections to or from any listener in ``addresses``; returns how many.

    Args:
        addresses: Gloo's store key (``../rank``) -> the member's address as Gloo wrote it.
    """
    ended = 0
    with suppress(OSError):  # no list of open files, or no room for one more
        for connection in _connections():
            with connection, suppress(OSError):  # not connected, or not any more
                if _is_of(connection, addresses):
                    connection.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def standing(addresses: Mapping[str, bytes]) -> int | None:
    """Counts this process' connections to or from any listener in ``addresses`` that the other side has not ended, or
    that hold unread bytes; None: they cannot be listed.

    Args:
        addresses: as `shut_down` takes them.
    """
    found = 0
    try:
        for connection in _connections():
            with connection, suppress(OSError):  # not connected, or not any more
                found += _is_of(connection, addresses) and _stands(connection)
    except OSError:
        return None
    return found


def _is_of(connection: socket.socket, addresses: Mapping[str, bytes]) -> bool:
    ends = (connection.getsockname(), connection.getpeername())
    return any(_holds(value, end) for end in ends for value in addresses.values())


def _stands(connection: socket.socket) -> bool:
    """Whether a connection is open. Only looks: a pending error of the socket stays for Gloo."""
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    unread_bytes = bytearray(4)
    fcntl.ioctl(connection, termios.FIONREAD, unread_bytes)
    return state == _ESTABLISHED or any(unread_bytes)


def _connections() -> Iterator[socket.socket]:
    """A duplicate of each internet socket of this process, so that the socket looked at is the one shut down. Raises
    OSError if the open files cannot be listed, or no descriptor is left."""
    for file in list(Path("/proc/self/fd").iterdir()):
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            duplicate = os.dup(int(file.name))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EBADF):  # closed meanwhile
                continue
            raise
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
    """The rank that an error ``message`` of Gloo's is about, if the address in it tells.

    The peer's port is its listener's or, if the peer connected to us, any port; then only the host can tell.
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


def unreachable(addresses: Mapping[str, bytes], own: int, limit_s: float) -> list[int]:
    """The ranks whose host does not answer: it neither accepts nor refuses a connection to their listeners.

    Args:
        addresses: Gloo's store key (``../rank``) -> the member's address as Gloo wrote it.
        own: this member's rank.
        limit_s: seconds to wait for answers, in all.

    Returns:
        the ranks; none where no file descriptor is left for a connection.
    """
    waiting: dict[socket.socket, int] = {}
    silent: list[int] = []
    try:
        for key, value in addresses.items():
            rank, address = int(key.rpartition("/")[2]), _address(value)
            if rank == own or address is None:
                continue
            try:
                probe = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            except OSError:
                return []
            waiting[probe] = rank
            probe.setblocking(False)
            if probe.connect_ex(address) in _NO_WAY:
                silent.append(waiting[probe])
        pending = {probe.fileno(): probe for probe, rank in waiting.items() if rank not in silent}
        answered = select.poll()  # not select(): it takes no descriptor above 1,023
        for descriptor in pending:
            answered.register(descriptor, select.POLLOUT)
        deadline = time.monotonic() + limit_s
        while pending and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in answered.poll(left_s * 1000):
                answered.unregister(descriptor)
                probe = pending.pop(descriptor)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _NO_WAY:
                    silent.append(waiting[probe])
        return sorted({*silent, *(waiting[probe] for probe in pending.values())})
    finally:
        for probe in waiting:
            probe.close()


def _address(value: bytes) -> tuple[str, int] | None:
    """Host and port of the first ``sockaddr`` in a member's address."""
    if found := re.search(rb"\x02\x00(..)(.{4})\x00{8}", value, re.DOTALL):
        return socket.inet_ntop(socket.AF_INET, found[2]), int.from_bytes(found[1], "big")
    if found := re.search(rb"\x0a\x00(..).{4}(.{16})", value, re.DOTALL):
        return socket.inet_ntop(socket.AF_INET6, found[2]), int.from_bytes(found[1], "big")
    return None


def _holds(value: bytes, address: tuple[str | int | None, ...]) -> bool:
    """Whether the ``sockaddr`` of ``address`` (host, port or None for any, ...) is in ``value``."""
    host, port = str(address[0]), address[1]
    version6 = ":" in host
    packed = socket.inet_pton(socket.AF_INET6 if version6 else socket.AF_INET, host.partition("%")[0])
    ports = b".." if port is None else re.escape(struct.pack(">H", int(port)))
    flow = b".{4}" if version6 else b""  # sockaddr_in6 has its flow label between port and address
    return re.search(ports + flow + re.escape(packed), value, re.DOTALL) is not None
