"""The address on which a coordinator listens: parsing it, and why it cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket

from ftopt.errors import UserError

_ANSWER_S, _ANSWER_BYTES = 1.0, 4096
"""Seconds and bytes for the answer of the process on a port, to tell whether it is a coordinator."""


def parse_address(bind: str) -> tuple[str, int]:
    """Returns ``host:port`` as a pair; raises `UserError`."""
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UserError(f"address {bind!r}; must be HOST:PORT with a port from 0 to 65535, e.g. 0.0.0.0:29410")
    return host.strip("[]") or "0.0.0.0", int(port)


async def cannot_listen(host: str, port: int, error: OSError) -> UserError:
    """The error for a user whose coordinator cannot listen there."""
    where = f"cannot listen on {host}:{port}: {_reason(error)}"
    if error.errno == errno.EADDRINUSE and await _is_coordinator(host, port):
        return UserError(
            f"{where}; a coordinator is there already, and serves several jobs, each with a name (--job): use "
            "that one, or choose another port (0 takes a free one)"
        )
    return UserError(f"{where}; {_listen_elsewhere(error)}")


def _reason(error: OSError) -> str:
    """The error's text without the address, which asyncio adds to it."""
    known = error.errno is not None and not isinstance(error, socket.gaierror)
    return os.strerror(error.errno) if known else error.strerror or str(error)  # type: ignore[arg-type]


def _listen_elsewhere(error: OSError) -> str:
    """What to do about it."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "give an address of this machine, or 0.0.0.0 for all of them"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "choose a port from 1024 on, or 0, which takes a free one"
    return "end what uses the port, or choose another one (port 0 takes a free one)"


async def _is_coordinator(host: str, port: int) -> bool:
    """Whether the process that listens there serves a coordinator's page."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port, limit=_ANSWER_BYTES)
            with contextlib.closing(writer):
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                await reader.readuntil(b"<title>ftopt</title>")
                return True
    return False
