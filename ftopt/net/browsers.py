"""Recognizes requests that a foreign web page makes, through a user's browser, to a server that needs no token.

A browser lets any page open a WebSocket to any address, and names the page in ``Origin``; ftopt's replicas send no such
header. A page whose own host name is made to resolve to the server (DNS rebinding) could read all answers. That name
in ``Host`` reveals it: it has a dot, like every name that can be registered.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit


def from_a_page(headers: Mapping[str, str], *, host: str, connects: bool = False) -> str:
    """Why a request may come from a foreign page, "" if it cannot. For a server that has no token.

    Args:
        host: the address that the server listens on.
        connects: whether it opens a replica's connection, which the server's own page never does.
    """
    named = headers.get("Host", "")
    origin = headers.get("Origin")
    if origin is not None and (connects or _host_of(origin) != named.lower()):
        return f"it comes from a web page, of {origin[:100]}"
    if connects and not is_loopback(host):  # replicas may use any name of this machine, and send no Origin
        return ""
    name = named.rpartition("]")[0].lstrip("[") if named.startswith("[") else named.partition(":")[0]
    if _may_be_registered(name, own=host):
        return (
            f"it calls this machine {name[:100]}, which may be any web page's name (DNS rebinding); without a token "
            "the address, localhost and this machine's own name are answered"
        )
    return ""


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # an unclosed bracket
        return ""


def _may_be_registered(name: str, *, own: str) -> bool:
    """Whether somebody other than this machine's owner may own ``name``."""
    name = name.rstrip(".").lower()
    if "." not in name or name.endswith(".localhost") or name in (own.lower(), socket.gethostname().lower()):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False


def is_loopback(host: str) -> bool:
    """Whether ``host``, an address or a name, is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
