"""Ports for servers that are started again at the same address."""

from __future__ import annotations

import socket


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket that keeps a free port until it is closed: servers can listen on it, one after the other, and nobody
    else is given it meanwhile. Without it, what runs in parallel may have the port when the next server starts."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers set it; and it does not listen
    holder.bind((host, 0))
    return holder
